"""Who is told of each request that has ended: as the options ask, and imported only then."""

from typing import Protocol

from penstock.core.config.options import FrontendOptions
from penstock.frontend.exchange.exchange import Observer


class Observing(Protocol):
    """One of them."""

    @property
    def note(self) -> Observer: ...

    def reopen(self) -> None:
        """A file may have been moved away."""

    async def close(self) -> None:
        """No more requests come."""


def observing(options: FrontendOptions) -> list[Observing]:
    """Those of these options.

    Raises:
        ConfigError: if a file cannot be opened.
    """
    found: list[Observing] = []
    if options.access_log:
        from penstock.frontend.exchange.access_log import AccessLog

        found.append(AccessLog(options.access_log, is_json=options.access_log_format == "json"))
    if options.otlp_traces_endpoint:
        from penstock.frontend.exchange.tracing import Traces

        found.append(Traces(options.otlp_traces_endpoint))
    return found
