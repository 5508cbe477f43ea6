"""The lines of a recording: one JSON object each, told apart by `kind`. Fields that have their default are left out.

    header   begins every file, and every run in it: a run is one scheduler process
    worker   workers are ready: rows are empty from here, and steps without a result have none
    request  a request has arrived
    order    a frontend paused or resumed a request, or dropped the prefix cache
    plan     a step was planned and sent
    result   it has returned
    encoded  a worker has made the embeddings of an image, beside steps
    end      a sequence has ended
    lost     so many lines are missing so far

`at` is in seconds since the run's start, whose time of day its header has. Buffers are base64 of what the messages
carry (`ipc/messages/`): little-endian int32 unless said otherwise. A digest is blake2b with a key that is random for
each run and written nowhere: equal things have equal digests within a run, and nobody can find the thing by trying.

A reader skips kinds and fields that it does not know, and lines that are damaged: a file may end in the middle of one.
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
    """What holds for the lines that follow, until the next header."""

    version: int
    run: str  # names the scheduler process
    part: int  # 0 begins the run; other files of it, or the same file, have the parts before
    unix_time: float  # of the run's start
    program: str  # Penstock's version
    options: dict[str, dict[str, Any]]  # "model", "scheduler" and "worker" -> option -> value
    has_tokens: bool  # prompts and outputs are there, not their digests alone


class Worker(Line, frozen=True, tag="worker"):
    """Workers are ready: the first ones, or others after a loss. Each part begins with those that are there."""

    at: float
    hello: dict[str, Any]  # the fields of its `WorkerHello` that differ from their defaults
    is_repeated: bool = False  # for a new part: nothing has happened to the workers


class Begun(Struct, frozen=True, omit_defaults=True, gc=False):
    """A sequence that has outputs from an earlier run, or none yet."""

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
    """A request, as the scheduler was asked it (`AddRequest`)."""

    at: float
    id: str
    num_tokens: int  # of the prompt
    digest: str  # of the prompt
    pages: bytes = b""
    """PAGE_DIGEST_BYTES for each full page of the prompt: of this page, all before it, and the cache's namespace. Two
    requests share as many pages as these begin alike."""
    token_ids: bytes = b""  # int32[num_tokens], if recorded
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of `SamplingParams` that differ from their defaults
    withheld: tuple[str, ...] = ()  # fields of `sampling` that could tell what was said: only in recordings with tokens
    begun: tuple[Begun, ...] = ()  # its unfinished sequences, if it was begun in an earlier run
    n: int = 1
    priority: int = 0
    seconds_left: float = 0.0
    tenant: str = ""  # a digest, as the next two
    group: str = ""
    salt: str = ""
    more: dict[str, Any] = field(default_factory=dict)  # other fields of the message that differ from their defaults
    refused: str = ""  # why it was refused: an error code
    images: tuple[RecordedImage, ...] = ()


class Order(Line, frozen=True, tag="order"):
    """What a frontend ordered; aborts are the ends of their sequences."""

    at: float
    order: str  # "pause", "resume" or "reset_prefix_cache"
    id: str = ""


class NewSequence(Struct, frozen=True, omit_defaults=True, gc=False):
    """A sequence that enters a row."""

    row: int
    id: str
    num_tokens: int  # known: its prompt, and outputs that it had before
    pages: bytes
    seq: int = 0
    grammar_id: int = 0


class Plan(Line, frozen=True, tag="plan"):
    """A step. In most steps the same rows decode as in the step before: then `columns` has nothing of the batch."""

    at: float
    step: int
    num_rows: int
    is_same: bool = False  # `rows`, `num_new` and `samples` are those of step - 1, and each `start` one more
    columns: dict[str, bytes] = field(default_factory=dict)  # the fields of `StepPlan` that are not empty
    new: tuple[NewSequence, ...] = ()
    num_preempted: int = 0  # sequences that lost their rows for others since the plan before


class Result(Line, frozen=True, tag="result"):
    """What a step has brought."""

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
    us: int = 0  # of the device's time
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
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at its first admission


class Lost(Line, frozen=True, tag="lost"):
    """Lines before this one could not be written."""

    at: float
    num_lines: int  # since the run's start


AnyLine = Header | Worker | Arrival | Order | Plan | Result | Encoded | End | Lost


def encoded(line: AnyLine, encoder: msgspec.json.Encoder) -> bytes:
    """The line's bytes, with its end."""
    return encoder.encode(line) + b"\n"


def told(message: Struct, *without: str) -> dict[str, Any]:
    """The fields of a message that differ from their defaults, by name, as JSON can hold them."""
    fields = zip(message.__struct_fields__, _defaults(type(message)), strict=True)
    return {
        name: msgspec.to_builtins(value, builtin_types=(bytes,))
        for name, default in fields
        if name not in without and (value := getattr(message, name)) != default
    }


def read_back(fields: dict[str, Any], kind: type[S], **others: Any) -> S:
    """The message of which `told` told these fields; those that this version does not know are left out.

    Args:
        fields: by name, from JSON.
        kind: the message's type.
        others: fields that were not told, as they are.

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
    """Each field's default; an object that equals no value for a field that has none."""
    if kind not in _defaults_of:
        _defaults_of[kind] = tuple(map(_default, msgspec.structs.fields(kind)))
    return _defaults_of[kind]


def _default(each: msgspec.structs.FieldInfo) -> object:
    if each.required:
        return _REQUIRED
    return each.default if each.default is not msgspec.NODEFAULT else each.default_factory()


KINDS: dict[str, type[AnyLine]] = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyLine)}
"""By their tags."""
