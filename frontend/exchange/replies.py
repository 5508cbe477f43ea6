"""What handlers take and give: nothing here or in the handlers knows a web framework.

A handler is `async def handler(service, record, body) -> Reply | StreamReply` and raises `ApiError`.
`exchange.py` turns errors into `error_reply`, and calls `StreamReply.close()` on every path, also if the client
has left.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.frontend.errors import OPENAI, ApiError, ErrorShape, http_headers
from penstock.frontend.exchange.access import KeyUse
from penstock.frontend.targets import Targets
from penstock.ipc.messages import Sampling

JSON = "application/json"
FORM = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Upload:
    """The body of a form, on its way in: not read yet, and never held as a whole."""

    content_type: str
    next_piece: Callable[[], Awaitable[bytes]]  # gives what has come of the body; nothing at its end


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
        """Call this once nothing more is to come."""


class Asked(Protocol):
    """What a request for output asks for (`frontend/validation/common.py`)."""

    @property
    def model(self) -> str: ...

    @property
    def n(self) -> int: ...

    @property
    def stream(self) -> bool: ...

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def sampling(self) -> Sampling: ...


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request, for its log line and its metrics. Handlers fill in what they learn."""

    request_id: str
    endpoint: str
    arrived: float  # time.monotonic, seconds (an event loop's clock may be coarse)
    seconds: float | None = None  # that it may take, from its arrival; None: any time
    targets: Targets | None = None  # for its tokens, by its headers and its body
    targets_met: bool = False  # of a request that has ended
    key_id: str = ""  # of the API key that it came with; empty if there are no keys
    tenant: str = ""  # who shares the engine with others: the API key, else the client's address; or a user of these
    engine: str = ""  # that it was sent to last; empty if there is only one
    asked: Asked | None = None  # once it is submitted to the engine
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
    bill: Billed | None = None
    error: ApiError | None = None
    warnings: list[str] = field(default_factory=list)  # for the client; see `exchange.py`
    query: dict[str, str] = field(default_factory=dict)
    argument: str = ""  # what stands at the place of `{id}` in the route's path
    item: str = ""  # the same of `{item}`
    headers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of the request, by their names in lower case
    on_end: Callable[[], None] | None = None  # called when the request has ended, however it did
    is_background: bool = False  # nobody waits for it: others come first, and its answer tells nothing of the moment
    is_kept: bool = False  # its work goes on without the client, and ends later than the exchange

    def end(self) -> None:
        """The request has ended: free what was held for it."""
        if self.on_end is not None:
            self.on_end()


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Background:
    """A stream that goes on without any client: its id, and what is answered at once (None: the stream)."""

    stream_id: str
    answer: Reply | None


def _ignore(error: ApiError) -> None:
    """Nothing runs behind this stream."""


@dataclass(frozen=True, slots=True)
class StreamReply:
    """An answer in pieces. `close` stops the work behind it; it is idempotent and may come at any time."""

    chunks: AsyncGenerator[bytes, None]
    close: Callable[[], None]
    headers: dict[str, str]
    fail: Callable[[ApiError], None] = _ignore  # ends the work with an error, which the stream then tells of
    background: Background | None = None


class Keeper(Protocol):
    """Keeps streams beyond their connections (`frontend/streams/`). It takes a request's record over: `is_kept`."""

    async def answer(
        self, record: RequestRecord, handling: Coroutine[None, None, Reply | StreamReply], ended: Callable[[], None]
    ) -> Reply | StreamReply:
        """Let a handler work until it has an answer, whether or not the client waits; keep that if it is a stream.

        `ended` is called when a kept request has ended.
        """
        ...

    def detach(self, record: RequestRecord, reply: StreamReply, ended: Callable[[], None]) -> Reply | StreamReply:
        """Keep a background stream; what is answered at once."""
        ...


def error_reply(error: ApiError, shape: ErrorShape = OPENAI) -> Reply:
    """The answer to a request that failed before its first byte."""
    return Reply(shape.write(error), shape.status(error), headers=http_headers(error))
