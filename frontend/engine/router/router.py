"""The router of one frontend: asks the policy, and counts what was sent to each engine."""

from collections.abc import Sequence
from functools import partial
from random import Random

from prometheus_client import CollectorRegistry

from penstock.config.options import Config, SchedulerOptions
from penstock.frontend.engine.book import DeltaSink, LiveRequest
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.engine.router.engine import Engine, Sent
from penstock.frontend.engine.router.metrics import RouterMetrics
from penstock.frontend.engine.router.policy import Choice
from penstock.frontend.engine.router.prompt import Prompt
from penstock.frontend.engine.router.registry import POLICIES
from penstock.frontend.errors import ApiError
from penstock.ipc.messages import CacheEvents, SequenceDelta


def router_for(config: Config, num_engines: int, registry: CollectorRegistry) -> "EngineRouter | None":
    """Return the router that the options ask for; None if there is nothing to choose."""
    return EngineRouter(config.frontend.routing, config.scheduler, registry) if num_engines > 1 else None


class EngineRouter:
    """Chooses among the engines of a book (`Router` in `frontend/engine/routing.py`)."""

    def __init__(
        self, policy: str, limits: SchedulerOptions, registry: CollectorRegistry, seed: int | None = None
    ) -> None:
        """`policy` is a name in the registry of policies.

        `limits`: for the queues of engines that report none. `registry`: for the router's counters.
        """
        self._limits = limits
        self._policy = POLICIES[policy](Random(seed))
        self._metrics = RouterMetrics(registry)
        self._engines: dict[EngineLink, Engine] = {}
        self._routed: dict[LiveRequest, _Routed] = {}
        self._chosen: tuple[LiveRequest, Prompt, Choice] | None = None

    @property
    def engines(self) -> Sequence[Engine]:
        """All engines, in the order in which they joined."""
        return list(self._engines.values())

    # --- engines ------------------------------------------------------------------------------

    def join(self, link: EngineLink, label: str) -> None:
        engine = self._engines[link] = Engine(link, label, self._limits)
        if self._policy.uses_cache:
            link.on_cache_events = partial(self._on_cache_events, engine)

    def leave(self, link: EngineLink) -> None:
        del self._engines[link]
        link.on_cache_events = None

    def lost(self, link: EngineLink) -> None:
        if link in self._engines:
            self._engines[link].cached.forget()

    def _on_cache_events(self, engine: Engine, events: CacheEvents) -> None:
        num_gaps = engine.cached.num_gaps
        engine.cached.take(events)
        if engine.cached.num_gaps > num_gaps:
            self._metrics.gaps.labels(engine.label).inc()

    # --- requests -----------------------------------------------------------------------------

    def choose(self, live: LiveRequest, links: Sequence[EngineLink]) -> EngineLink:
        able = [self._engines[link] for link in links]
        engines = [engine for engine in able if engine.link not in live.tried] or able
        request = live.request
        num_tokens = len(request.prompt_token_ids) // 4
        what = live.known_tokens, request.cache_salt, num_tokens, request.n, request.images, request.adapter
        prompt = Prompt(*what)
        first = choice = self._policy.choose(prompt, engines)
        while not choice.engine.has_room(request):
            engines.remove(choice.engine)
            if not engines:
                choice = first  # the scheduler itself decides whether it has room
                break
            choice = self._policy.choose(prompt, engines)
        self._chosen = live, prompt, choice
        return choice.engine.link

    def sent(self, live: LiveRequest, link: EngineLink) -> None:
        assert self._chosen is not None
        _, prompt, choice = self._chosen
        engine, num_expected = choice.engine, choice.num_expected
        sent = Sent(max(0, prompt.num_tokens - num_expected), prompt.num_tokens, len(live.unfinished))
        self._routed[live] = _Routed(engine, sent, num_expected, is_new=not live.tried and live.is_new)
        engine.begin(sent)
        if self._policy.uses_cache:
            engine.cached.expect(prompt.keys(engine.cached))
        self._metrics.requests.labels(engine.label, choice.reason).inc()
        self._metrics.prompt_tokens.labels(engine.label).inc(prompt.num_tokens)
        if not isinstance(live.sink, _FirstToken):
            live.sink = _FirstToken(self, live)

    def gone(self, live: LiveRequest) -> None:
        routed = self._routed.pop(live, None)
        if routed is not None:
            if not routed.has_begun:
                routed.engine.prefilled(routed.sent)
            routed.engine.end(routed.sent)

    def refused(self, link: EngineLink) -> None:
        self._metrics.refused.labels(self._engines[link].label).inc()

    def begun(self, live: LiveRequest, num_found: int) -> None:
        """A request has its first token, and `num_found` of its tokens were cached."""
        routed = self._routed.get(live)
        if routed is not None and not routed.has_begun:
            routed.has_begun = True
            routed.engine.prefilled(routed.sent)
            if routed.is_new:
                self._metrics.expected_tokens.labels(routed.engine.label).inc(routed.num_expected)
                self._metrics.found_tokens.labels(routed.engine.label).inc(num_found)


class _Routed:
    """A request at an engine."""

    __slots__ = ("engine", "has_begun", "is_new", "num_expected", "sent")

    def __init__(self, engine: Engine, sent: Sent, num_expected: int, *, is_new: bool) -> None:
        self.engine = engine
        self.sent = sent
        self.num_expected = num_expected
        self.is_new = is_new
        self.has_begun = False


class _FirstToken:
    """A request's sink until its first token: tells the router of it, then takes itself out of the way."""

    def __init__(self, router: EngineRouter, live: LiveRequest) -> None:
        self._router = router
        self._live = live
        self._sink: DeltaSink = live.sink
        self.bill = live.sink.bill

    def push(self, first_index: int, delta: SequenceDelta) -> None:
        if delta.token_ids:
            self._live.sink = self._sink
            self._router.begun(self._live, delta.num_cached_tokens)
        self._sink.push(first_index, delta)

    def fail(self, error: ApiError) -> None:
        self._sink.fail(error)
