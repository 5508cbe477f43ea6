"""The lines of a recording: one JSON object each, distinguished by `kind`. Fields with their default are left out.

    header   begins every file, and every run in it: a run is one scheduler process
    worker   workers are ready: rows are empty from here, and pending steps will get no result
    request  a request has arrived
    order    a frontend paused or resumed a request, or dropped the prefix cache
    plan     a step was planned and sent
    result   a step has returned
    encoded  a worker has made the embeddings of an image, beside steps
    end      a sequence has ended
    lost     how many lines are missing so far

`at` is in seconds since the run's start; the header has the start's time of day. Buffers are the messages' buffers
(`ipc/messages/`) in base64: little-endian int32 unless said otherwise. A digest is blake2b with a random key for each
run that is never written: equal content has equal digests within a run, but it cannot be found by guessing.

A reader skips unknown kinds and fields, and damaged lines: a file may end in the middle of a line.
"""

from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Struct, field

VERSION = 1

PAGE_DIGEST_BYTES = 8

S = TypeVar("S", bound=Struct)


class Line(Struct, frozen=True, tag_field="kind", omit_defaults=True, kw_only=True, gc=False):
    """Base of all kinds."""


class Header(Line, frozen=True, tag="header"):
    """Facts that hold for the following lines, until the next header."""

    version: int
    run: str  # names the scheduler process
    part: int  # 0 begins the run; earlier parts are in older files, or in the same file
    unix_time: float  # at the run's start
    program: str  # Penstock's version
    options: dict[str, dict[str, Any]]  # "model", "scheduler", "worker" and parts -> option -> value
    has_tokens: bool  # whether prompts and outputs are recorded, not only their digests


class Worker(Line, frozen=True, tag="worker"):
    """Workers are ready: the first ones, or new ones after a loss. Each part begins with the current workers."""

    at: float
    hello: dict[str, Any]  # the fields of its `WorkerHello` that differ from their defaults
    is_repeated: bool = False  # repeated for a new part: the workers are the same


class Begun(Struct, frozen=True, omit_defaults=True, gc=False):
    """An unfinished sequence of an earlier run, with or without outputs."""

    seq: int
    num_tokens: int = 0
    token_ids: bytes = b""  # int32[num_tokens], if recorded


class RecordedImage(Struct, frozen=True, array_like=True, gc=False):
    """An image of a prompt: never its pixels."""

    key: str  # of its content; a digest of that in recordings without tokens
    start: int
    length: int
    num_embeddings: int
    grid: tuple[int, ...]
    num_bytes: int  # of its pixels


class Arrival(Line, frozen=True, tag="request"):
    """A request as the scheduler got it (`AddRequest`)."""

    at: float
    id: str
    num_tokens: int  # of the prompt
    digest: str  # of the prompt
    pages: bytes = b""
    """PAGE_DIGEST_BYTES for each full page of the prompt: a digest of the page, all pages before it, and the cache's
    namespace. The length of the common beginning is the number of pages that two requests share."""
    token_ids: bytes = b""  # int32[num_tokens], if recorded
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of `SamplingParams` that differ from their defaults
    withheld: tuple[str, ...] = ()  # fields of `sampling` that could reveal content: only in recordings with tokens
    begun: tuple[Begun, ...] = ()  # its unfinished sequences, if it began in an earlier run
    n: int = 1
    priority: int = 0
    seconds_left: float = 0.0
    tenant: str = ""  # a digest, like the next two
    group: str = ""
    salt: str = ""
    more: dict[str, Any] = field(default_factory=dict)  # other fields of the message that differ from their defaults
    refused: str = ""  # why it was refused: an error code
    images: tuple[RecordedImage, ...] = ()


class Order(Line, frozen=True, tag="order"):
    """An order of a frontend. Aborts are recorded as the ends of their sequences."""

    at: float
    order: str  # "pause", "resume" or "reset_prefix_cache"
    id: str = ""


class NewSequence(Struct, frozen=True, omit_defaults=True, gc=False):
    """A sequence that enters a row."""

    row: int
    id: str
    num_tokens: int  # known tokens: its prompt, and earlier outputs
    pages: bytes
    seq: int = 0
    grammar_id: int = 0


class Plan(Line, frozen=True, tag="plan"):
    """A step. In most steps the same rows decode as in the one before; then `columns` leaves out the batch."""

    at: float
    step: int
    num_rows: int
    is_same: bool = False  # `rows`, `num_new` and `samples` are those of step - 1, and each `start` one more
    columns: dict[str, bytes] = field(default_factory=dict)  # the fields of `StepPlan` that are not empty
    new: tuple[NewSequence, ...] = ()
    num_preempted: int = 0  # sequences preempted since the last plan


class Result(Line, frozen=True, tag="result"):
    """The result of a step."""

    at: float
    step: int
    forward_us: int = 0
    idle_us: int = 0
    digest: str = ""  # of `token_ids`
    token_ids: bytes = b""  # int32[tokens], in the order of the plan's sampling rows; if recorded
    num_tokens: bytes = b""  # int32[sampling rows]; empty: one each
    failed: tuple[tuple[int, str], ...] = ()  # sampling rows without a token, and why: an error code


class Encoded(Line, frozen=True, tag="encoded"):
    """An image was embedded, or could not be."""

    at: float
    num_embeddings: int  # 0: no request waits for it any more
    us: int = 0  # device time
    failed: bool = False


class End(Line, frozen=True, tag="end"):
    """The end of a sequence."""

    at: float
    id: str
    reason: str  # "stop", "length", "error", or "abort": its client has left, or a stop string was found
    num_tokens: int  # output
    seq: int = 0
    digest: str = ""  # of the output tokens
    token_ids: bytes = b""  # int32[num_tokens], if recorded
    stop_token_id: int | None = None
    error: str = ""  # a code
    first_token_at: float = 0.0  # 0: there was none
    queued_us: int = 0  # until its first row
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at its first admission


class Lost(Line, frozen=True, tag="lost"):
    """Lines before this one could not be written."""

    at: float
    num_lines: int  # since the run's start


AnyLine = Header | Worker | Arrival | Order | Plan | Result | Encoded | End | Lost


def encoded(line: AnyLine, encoder: msgspec.json.Encoder) -> bytes:
    """Return the line's bytes, with the line end."""
    return encoder.encode(line) + b"\n"


def told(message: Struct, *without: str) -> dict[str, Any]:
    """Return the fields of a message that differ from their defaults, by name, in a form for JSON."""
    fields = zip(message.__struct_fields__, _defaults(type(message)), strict=True)
    return {
        name: msgspec.to_builtins(value, builtin_types=(bytes,))
        for name, default in fields
        if name not in without and (value := getattr(message, name)) != default
    }


def read_back(fields: dict[str, Any], kind: type[S], **others: Any) -> S:
    """Rebuild a message from the fields that `told` returned; leave out those that this version does not know.

    Args:
        fields: by name, from JSON.
        kind: the message's type.
        others: fields that were not recorded, with their values.

    Raises:
        msgspec.ValidationError: a field is missing, or is not what it should be.
    """
    types = get_type_hints(kind, include_extras=True)
    known = {name: msgspec.convert(value, types[name]) for name, value in fields.items() if name in types}
    try:
        return kind(**(known | others))
    except TypeError as error:
        raise msgspec.ValidationError(str(error)) from None


_REQUIRED = object()
_defaults_of: dict[type[Struct], tuple[object, ...]] = {}


def _defaults(kind: type[Struct]) -> tuple[object, ...]:
    """Return each field's default; for a field without one, an object that equals no value."""
    if kind not in _defaults_of:
        _defaults_of[kind] = tuple(map(_default, msgspec.structs.fields(kind)))
    return _defaults_of[kind]


def _default(each: msgspec.structs.FieldInfo) -> object:
    if each.required:
        return _REQUIRED
    return each.default if each.default is not msgspec.NODEFAULT else each.default_factory()


KINDS: dict[str, type[AnyLine]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyLine)}
"""The kinds of lines by their tags."""
