"""The observers of ended requests that the options ask for; their code is imported only then."""

from pathlib import Path
from typing import Protocol

from penstock.config.options import FrontendOptions
from penstock.frontend.exchange.exchange import Observer


class Observing(Protocol):
    """One observer."""

    @property
    def note(self) -> Observer: ...

    def reopen(self) -> None:
        """Open files again: they may have been moved away."""

    async def close(self) -> None:
        """Finish: no more requests will come."""


def observing(options: FrontendOptions) -> list[Observing]:
    """The observers that these options ask for.

    Raises:
        ConfigError: if a file cannot be opened.
    """
    found: list[Observing] = []
    if options.access_log:
        from penstock.frontend.exchange.access_log import AccessLog

        found.append(AccessLog(options.access_log, is_json=Path(options.access_log).suffix in (".json", ".jsonl")))
    if options.otlp_traces_endpoint:
        from penstock.frontend.exchange.tracing import Traces

        found.append(Traces(options.otlp_traces_endpoint))
    return found
