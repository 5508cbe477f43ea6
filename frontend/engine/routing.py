"""The interface between the book of live requests and the router that chooses among its engines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.frontend.engine.link import EngineLink

if TYPE_CHECKING:
    from penstock.frontend.engine.book import LiveRequest


class Router(Protocol):
    """Chooses the engine of each request if there are several (`frontend/engine/router/`). It never waits."""

    def join(self, link: EngineLink, label: str) -> None:
        """An engine joins; its link is not open yet."""

    def leave(self, link: EngineLink) -> None:
        """An engine is no longer used."""

    def lost(self, link: EngineLink) -> None:
        """An engine is gone. If it comes back, it has nothing cached."""

    def choose(self, live: "LiveRequest", links: Sequence[EngineLink]) -> EngineLink:
        """Return the engine for a request: one of `links`, at least one, all of which take requests.

        Avoids engines that the request has tried, if possible.
        """

    def sent(self, live: "LiveRequest", link: EngineLink) -> None:
        """The request was sent to the engine that was just chosen."""

    def refused(self, link: EngineLink) -> None:
        """An engine's queue had no room for a request, which goes to another engine."""

    def gone(self, live: "LiveRequest") -> None:
        """No engine has the request any more. Idempotent."""
