"""Streams that outlive their connections."""

from penstock.frontend.api import streams
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.statuses import LOOKS_UP

ROUTES = (
    Route(
        "GET", "/v1/streams/{id}", streams.continue_stream, "Continue a stream",
        errors=(400, *LOOKS_UP, 410), streams=True, query=(("starting_after", "integer"),),
    ),
    Route(
        "DELETE", "/v1/streams/{id}", streams.stop_stream, "Stop a stream",
        streams.DeletedStream, errors=LOOKS_UP,
    ),
)  # fmt: skip
