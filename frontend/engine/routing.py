"""What a book of live requests asks of the one who chooses among its engines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.frontend.engine.link import EngineLink

if TYPE_CHECKING:
    from penstock.frontend.engine.book import LiveRequest


class Router(Protocol):
    """Chooses the engine of each request, where there are several (`frontend/engine/router/`). It never waits."""

    def join(self, link: EngineLink, label: str) -> None:
        """There is one more engine; its link is not open yet."""

    def leave(self, link: EngineLink) -> None:
        """An engine is used no more."""

    def lost(self, link: EngineLink) -> None:
        """An engine is gone. It may come back, and has nothing cached then."""

    def choose(self, live: "LiveRequest", links: Sequence[EngineLink]) -> EngineLink:
        """Return the engine for a request, one of these, which take requests; there is at least one.

        If it can, not one that the request has tried.
        """

    def sent(self, live: "LiveRequest", link: EngineLink) -> None:
        """It was sent to the engine that was chosen just now."""

    def refused(self, link: EngineLink) -> None:
        """An engine's queue was full for a request, which goes to another one."""

    def gone(self, live: "LiveRequest") -> None:
        """No engine has it any more. Idempotent."""
