"""Batches as the API shows them, and a line of their input."""

from collections.abc import Iterable
from typing import Any, Literal, get_args

from msgspec import Raw, Struct

from penstock.frontend.exchange.exchange import Route
from penstock.parts.batches.frontend.files.shapes import ExpiresAfter

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
WINDOW_SECONDS = {"24h": 24 * 3600}
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


def endpoints_of(routes: Iterable[Route]) -> dict[str, Route]:
    """Those of the routes that lines may be for, by their paths."""
    return {route.path: route for route in routes if route.method == "POST" and route.path in get_args(Endpoint)}


class BatchRequest(Struct, frozen=True):
    """What a new batch is made of."""

    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str | None = None
    metadata: dict[str, Any] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(Struct, frozen=True):
    """What is wrong with the input file."""

    code: str
    message: str
    line: int | None = None  # from 1
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, frozen=True):
    """A batch; times are Unix seconds, None as long as it has not come to that."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    object: Literal["batch"] = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(Struct, frozen=True):
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class Line(Struct, frozen=True):
    """A request in an input file."""

    custom_id: str
    method: str
    url: str
    body: Raw
