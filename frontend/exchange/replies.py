"""What handlers take and return. Neither this file nor the handlers know a web framework.

A handler is `async def handler(service, record, body) -> Reply | StreamReply` and raises `ApiError`.
`exchange.py` turns errors into `error_reply`, and calls `StreamReply.close()` on every path, even if the client
has left.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.frontend.errors import OPENAI, ApiError, ErrorShape, http_headers
from penstock.frontend.exchange.access import KeyUse
from penstock.frontend.targets import Targets
from penstock.ipc.messages import SamplingParams

JSON = "application/json"
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Upload:
    """The body of a form, which is still to be read; it is never held as a whole."""

    content_type: str
    next_piece: Callable[[], Awaitable[bytes]]  # returns the next bytes of the body; empty at its end


class Billed(Protocol):
    """What the engine spent on a request (`frontend/engine/book.py`)."""

    queue_seconds: float | None
    num_steps: int
    device_seconds: float
    kv_byte_seconds: float
    num_saved_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    waited_for: str
    cache_miss: str

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""

    def price(self, per_hour: float) -> float:
        """What the device seconds cost."""

    def when_complete(self, callback: Callable[[], None]) -> None:
        """Call `callback` once nothing more is to come."""


class Asked(Protocol):
    """The parameters of a request for output (`frontend/validation/common.py`)."""

    @property
    def model(self) -> str: ...

    @property
    def n(self) -> int: ...

    @property
    def stream(self) -> bool: ...

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def sampling(self) -> SamplingParams: ...


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request: what it asks for and with which limits, and what its log line and metrics say.

    Handlers fill in what they learn.
    """

    request_id: str
    endpoint: str
    arrived: float  # time.monotonic, seconds (an event loop's clock may be coarse)
    seconds: float | None = None  # its time limit, from its arrival; None: no limit
    targets: Targets | None = None  # for its tokens, from its headers and its body
    targets_met: bool = False  # set when the request has ended
    key_id: str = ""  # of the API key it came with; empty if there are no keys
    tenant: str = ""  # for fair sharing: the API key, else the client's address; or a user of one of them
    engine: str = ""  # the last one it was sent to; empty if there is only one
    asked: Asked | None = None  # set once it is submitted to the engine
    adapter: str = ""  # name of the adapter that answers; set with it
    key_use: KeyUse | None = None  # of its key; set once the request counts towards the limits
    num_added_seqs: int = 0  # sequences besides the first that count too
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
    queue_seconds: float = 0.0  # from submission to its first row
    finish_reasons: list[str] = field(default_factory=list)
    bill: Billed | None = None
    error: ApiError | None = None
    warnings: list[str] = field(default_factory=list)  # for the client; see `exchange.py`
    query: dict[str, str] = field(default_factory=dict)
    argument: str = ""  # the value of `{id}` in the route's path
    item: str = ""  # the value of `{item}`
    headers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the request, by their names in lower case
    on_end: Callable[[], None] | None = None  # called when the request has ended, in whatever way
    is_background: bool = False  # no client waits: others go first, and its usage has no cached tokens
    is_kept: bool = False  # its work goes on without the client and outlives the exchange

    def end(self) -> None:
        """The request has ended: free what was held for it."""
        if self.on_end is not None:
            self.on_end()


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Background:
    """A stream that goes on without a client: its id, and the immediate answer (None: the stream itself)."""

    stream_id: str
    answer: Reply | None


def _ignore(error: ApiError) -> None:
    """Do nothing: no work runs behind this stream."""


@dataclass(frozen=True, slots=True)
class StreamReply:
    """An answer in pieces. `close` stops the work behind it; it is idempotent and may be called at any time."""

    chunks: AsyncGenerator[bytes, None]
    close: Callable[[], None]
    headers: dict[str, str]
    fail: Callable[[ApiError], None] = _ignore  # ends the work with an error, which the stream then sends
    background: Background | None = None


class Keeper(Protocol):
    """Keeps streams beyond their connections (`frontend/streams/`). It takes over a request's record: `is_kept`."""

    async def answer(
        self, record: RequestRecord, handling: Coroutine[None, None, Reply | StreamReply], ended: Callable[[], None]
    ) -> Reply | StreamReply:
        """Keep the handler's answer if it is a stream: the handler then goes on even if the client leaves.

        `ended` is called when a kept request has ended.
        """
        ...

    def detach(self, record: RequestRecord, reply: StreamReply, ended: Callable[[], None]) -> Reply | StreamReply:
        """Keep a background stream; return the immediate answer."""
        ...


def error_reply(error: ApiError, shape: ErrorShape = OPENAI) -> Reply:
    """The answer to a request that failed before its first byte."""
    return Reply(shape.write(error), shape.status(error), headers=http_headers(error))
