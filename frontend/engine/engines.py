"""All engines of a frontend, for probes and administrators. `book.py` knows which engine has which request."""

import asyncio
from collections.abc import Sequence

from penstock.frontend.engine.link import EngineLink
from penstock.frontend.errors import Unavailable
from penstock.ipc.messages import (
    DrainEngine,
    EngineStats,
    ExpertLoad,
    ListRequests,
    ProfileSteps,
    RequestList,
    ResetPrefixCache,
    SetRole,
)


class Engines:
    """The links to all engines. Make it inside the running event loop."""

    def __init__(self) -> None:
        self._links: list[EngineLink] = []
        self.ready = asyncio.Event()
        """Set while an engine takes requests."""

    def label(self, link: EngineLink) -> str:
        """The name of an engine for metrics and administrators."""
        return link.to.label or str(self._links.index(link))

    @property
    def stats(self) -> EngineStats | None:
        """The latest statistics of the first engine that has reported any."""
        return next((link.stats for link in self._links if link.stats is not None), None)

    @property
    def all_stats(self) -> dict[str, EngineStats]:
        """The latest statistics of each connected engine, by its label; the label is empty if there is only one."""
        return {link.to.label: link.stats for link in self._links if link.stats is not None}

    @property
    def not_ready_reason(self) -> str:
        """Why no engine takes requests."""
        reasons = dict.fromkeys("it is draining" if link.is_draining else link.not_ready_reason for link in self._links)
        return "; ".join(reasons)

    @property
    def stuck_seconds(self) -> float:
        """For how long all engines that report they are ready have computed nothing, although each has work."""
        return min((link.stuck_seconds for link in self._links if link.facts is not None), default=0.0)

    @property
    def silent_seconds(self) -> float:
        """How long an engine that was connected before has been silent, although there is work and no other engine."""
        return 0.0 if self.ready.is_set() else max(link.silent_seconds for link in self._links)

    @property
    def links(self) -> Sequence[EngineLink]:
        """All links, in the order in which they joined."""
        return self._links

    def reset_prefix_cache(self) -> None:
        """Make the schedulers drop all cached pages that no sequence uses.

        Raises:
            Unavailable: if no engine is connected, or the queue to a scheduler is full.
        """
        self._order_all(ResetPrefixCache())

    def profile_steps(self, num_steps: int) -> None:
        """Make the workers record their next steps; 0 ends a recording. Raises the same error."""
        self._order_all(ProfileSteps(num_steps))

    def _order_all(self, order: ResetPrefixCache | ProfileSteps) -> None:
        sent = [link.send(order) for link in self._links if link.facts is not None]
        if not sent or not all(sent):
            raise self._unavailable()

    @property
    def expert_loads(self) -> list[ExpertLoad]:
        """The engines' latest reports about their experts, which may be some seconds old."""
        return [link.expert_load for link in self._links if link.expert_load is not None]

    def order(self, link: EngineLink, order: DrainEngine | SetRole) -> None:
        """Give an engine an order.

        Raises:
            Unavailable: if the queue to its scheduler is full.
        """
        if not link.send(order):
            raise Unavailable("the queue to the engine is full", retry_after=1)

    async def list_requests(self, question: ListRequests, seconds: float) -> dict[str, RequestList]:
        """Return what the requests of each engine are doing, by its label; engines that do not answer are left out."""
        asked = [(self.label(link), link) for link in self._links]  # engines may come and go meanwhile
        answers = await asyncio.gather(*(link.ask(question, seconds) for _, link in asked))
        told = zip((label for label, _ in asked), answers, strict=True)
        return {label: answer for label, answer in told if isinstance(answer, RequestList)}

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"no engine is ready: {self.not_ready_reason}", retry_after=5)
