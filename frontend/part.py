"""What requests may do without, as a frontend sees it: routes of their own, and what stands behind them.

A part overrides what it needs. The frontend asks once, at its start, who overrides what; so a part that is not there
costs nothing, and no file outside of the part names it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Self, TypeVar

from penstock.config.parts import brought
from penstock.frontend.errors import InvalidRequest, UnsupportedParameter
from penstock.frontend.exchange.exchange import Dialect, Route
from penstock.ipc.messages import EngineReady
from penstock.ipc.overrides import calls, overriding


class FrontendPart:
    """A part in one frontend process. Its `frontend.py` lists the class as `PARTS`.

    Messages from engines reach it through the links: `link.listeners[MESSAGE] = ...`, or as the answer of `link.ask`.
    What it counts itself it registers in `service.metrics.registry`; what engines report of it is in its `metrics.py`.
    """

    routes: ClassVar[tuple[Route, ...]] = ()
    """Its routes. Their handlers find the part's object by `service.parts.get`."""

    dialect: ClassVar[Dialect | None] = None
    """What requests with a header get at paths of others, and where there is nothing."""

    @classmethod
    def of(cls, service: Any) -> "FrontendPart | None":
        """The part of this frontend; None if it is switched off, or the model has no use for it.

        Called inside the event loop, as soon as the service (`Service`) has all but its `prompts`.
        """
        return cls()

    async def start(self) -> None:
        """The frontend is about to serve."""

    async def engine_ready(self, facts: EngineReady) -> None:
        """The first engine has become ready."""

    async def serve(self, name: str, path: str) -> None:
        """Serve one more model, under this name: the served one with what is at a path.

        Raises:
            ApiError: it cannot be served.
        """
        raise NotImplementedError

    def searcher(self, beams: Any, engine: Any) -> Any:
        """What searches for sequences with the engine: a request with `Beams` asks it in place of the engine.

        Both are `TokenSource`s (`frontend/engine/generation.py`).
        """
        raise NotImplementedError

    def share_stored(self, other: Self) -> None:
        """From now on, share what is stored with the same part of another service in this process."""

    async def stop(self) -> None:
        """The frontend is about to end: begin nothing more, while requests in progress go on."""

    async def close(self) -> None:
        """The frontend ends, and all requests have ended."""


_Part = TypeVar("_Part", bound=FrontendPart)


class FrontendParts:
    """The parts that a frontend has, and who of them overrides what."""

    def __init__(self, service: Any) -> None:
        found = (kind.of(service) for kind in brought("frontend", FrontendPart))
        self._all = tuple(part for part in found if part is not None)
        self._start: list[Callable[[], Awaitable[None]]] = calls(FrontendPart, self._all, "start")
        self._serve: list[Callable[[str, str], Awaitable[None]]] = calls(FrontendPart, self._all, "serve")
        self._searcher: list[Callable[[Any, Any], Any]] = calls(FrontendPart, self._all, "searcher")
        self._engine_ready: list[Callable[[EngineReady], Awaitable[None]]] = calls(
            FrontendPart, self._all, "engine_ready"
        )
        self._storing = overriding(FrontendPart, self._all, "share_stored")
        self._stop: list[Callable[[], Awaitable[None]]] = calls(FrontendPart, self._all, "stop")
        self._close: list[Callable[[], Awaitable[None]]] = calls(FrontendPart, self._all, "close")

    def get(self, kind: type[_Part]) -> _Part | None:
        """The part of this class, if it is there."""
        return next((part for part in self._all if isinstance(part, kind)), None)

    async def start(self) -> None:
        """Start all parts, in their order."""
        for start in self._start:
            await start()

    async def engine_ready(self, facts: EngineReady) -> None:
        """Tell all parts that the first engine has become ready."""
        for engine_ready in self._engine_ready:
            await engine_ready(facts)

    async def serve(self, name: str, path: str) -> None:
        """Serve one more model, under this name: the served one with what is at a path.

        Raises:
            ApiError: it cannot be served.
        """
        if not self._serve:
            raise InvalidRequest("no further model can be served beside this one: the part for that is not installed")
        for serve in self._serve:
            await serve(name, path)

    def searcher(self, beams: Any, engine: Any) -> Any:
        """What searches for sequences with the engine, as in `FrontendPart`.

        Raises:
            UnsupportedParameter: no part does.
        """
        if not self._searcher:
            raise UnsupportedParameter(
                "use_beam_search is not supported: the part for it is not installed", param="use_beam_search"
            )
        return self._searcher[0](beams, engine)

    def share_stored(self, others: "FrontendParts") -> None:
        """From now on, share what is stored with the parts of another service in this process."""
        for part in self._storing:
            if (other := others.get(type(part))) is not None:
                part.share_stored(other)

    async def stop(self) -> None:
        """Stop all parts, the last one first."""
        for stop in reversed(self._stop):
            await stop()

    async def close(self) -> None:
        """Close all parts, the last one first."""
        for close in reversed(self._close):
            await close()


def routes_of_parts() -> tuple[Route, ...]:
    """The routes of all parts that there are."""
    return tuple(route for kind in brought("frontend", FrontendPart) for route in kind.routes)


def dialects_of_parts() -> tuple[Dialect, ...]:
    """The dialects of all parts that there are."""
    return tuple(kind.dialect for kind in brought("frontend", FrontendPart) if kind.dialect is not None)
