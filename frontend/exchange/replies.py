"""What handlers take and give: nothing here or in the handlers knows a web framework.

A handler is `async def handler(service, record, body) -> Reply | StreamReply` and raises `ApiError`.
`exchange.py` turns errors into `error_reply`, and calls `StreamReply.close()` on every path, also if the client
has left.
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from penstock.frontend.errors import ApiError, error_body, http_headers
from penstock.frontend.exchange.access import KeyUse

JSON = "application/json"


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, for its log line and its metrics. Handlers fill in what they learn."""

    request_id: str
    endpoint: str
    arrived: float  # time.monotonic, seconds (an event loop's clock may be coarse)
    seconds: float | None = None  # that it may take, from its arrival; None: any time
    key_id: str = ""  # of the API key that it came with; empty if there are no keys
    tenant: str = ""  # who shares the engine's rows with others by turns: the API key, else the client's address
    key_use: KeyUse | None = None  # of that key, once the request counts for its limits
    num_added_seqs: int = 0  # that count for them too
    status: int = 0
    is_stream: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_calling: int = 0  # sequences that ended with tool calls
    first_token_at: float | None = None
    last_token_at: float = 0.0
    submitted_at: float = 0.0  # to the engine
    queue_seconds: float = 0.0  # from then to its first row
    finish_reasons: list[str] = field(default_factory=list)
    error: ApiError | None = None
    warnings: list[str] = field(default_factory=list)  # for the client; see `exchange.py`
    query: dict[str, str] = field(default_factory=dict)
    argument: str = ""  # what stands at the place of `{id}` in the route's path


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamReply:
    """An answer in pieces. `close` stops the work behind it; it is idempotent and may come at any time."""

    chunks: AsyncGenerator[bytes, None]
    close: Callable[[], None]
    headers: dict[str, str]


def error_reply(error: ApiError) -> Reply:
    """The answer to a request that failed before its first byte."""
    return Reply(error_body(error), error.status, headers=http_headers(error))
