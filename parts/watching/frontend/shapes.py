"""What is reported about engines, as JSON. All times are seconds of the scheduler's clock, whose zero is arbitrary."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct


class StepShape(Struct, frozen=True):
    """One step. A row is named by its number; ranges are [first, last]."""

    id: int
    left_out: int  # steps before it that are not reported
    sent: float
    returned: float
    plan_us: int
    forward_us: int
    idle_us: int  # time that the device waited before it
    decodes: list[tuple[int, int]]  # ranges of rows
    chunks: list[tuple[int, int]]  # row, tokens
    guesses: list[tuple[int, int, int]]  # row, tokens guessed, tokens that came
    waiting: int
    free_pages: int
    cached_pages: int
    host_pages: tuple[int, int]  # free, cached
    to_host: int  # pages copied
    from_host: int


class EventShape(Struct, frozen=True):
    """Something that has happened to a sequence."""

    at: float
    kind: str
    key: str  # of the sequence's request
    index: int
    row: int = -1
    tokens: int = 0
    more: int = 0
    text: str = ""
    until: float = 0.0


class RowShape(Struct, frozen=True):
    """Who has a row."""

    row: int
    key: str
    index: int
    arrived: float
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int


class WaitingShape(Struct, frozen=True):
    """Who waits, and why."""

    key: str
    index: int
    arrived: float
    prompt_tokens: int
    reason: str


class PictureShape(Struct, frozen=True):
    """The engine's sizes, and who has which row."""

    rows: int
    pages: int
    page_size: int
    host_pages: int
    disk_places: int
    running: list[RowShape]
    num_running: int


class StepsShape(Struct, frozen=True):
    """What has happened since the last such message."""

    engine: str
    number: int
    now: float
    unix_time: float
    steps: list[StepShape]
    left_out: int
    events: list[EventShape]
    events_left_out: int
    queue: list[WaitingShape]
    num_waiting: int
    reasons: dict[str, int]
    totals: dict[str, int]
    picture: PictureShape | None


class OwnerShape(Struct, frozen=True):
    """Who owns pages."""

    key: str
    index: int
    pages: int


class TierShape(Struct, frozen=True):
    """A tier's pages as runs of cells: [state, owner (-1: none), page group (-1: none), cells]."""

    tier: str
    pages: int
    cell: int  # pages
    runs: list[tuple[str, int, int, int]]
    counts: dict[str, int]  # pages in each state


class PageMapShape(Struct, frozen=True):
    """Who owns the pages of an engine's KV pool."""

    engine: str
    page_size: int
    owners: list[OwnerShape]
    tiers: list[TierShape]
    disk: dict[str, int]


class PrefixShape(Struct, frozen=True):
    """A part of a prefix: what follows `parent`, up to the next branch."""

    parent: int  # index of the parent in the list; -1: none
    tokens: int
    tokens_below: int
    users: int
    hits: int
    last_used_seconds: float | None  # ago; null: before the engine was watched
    text: str  # of its first tokens
    children: int
    namespace: str


class PrefixTreeShape(Struct, frozen=True):
    """An engine's prefix cache."""

    engine: str
    page_size: int
    pages: int
    namespaces: int
    nodes: list[PrefixShape]
    is_whole: bool


class LifeShape(Struct, frozen=True):
    """What has happened to a request."""

    engine: str
    id: str  # `x-request-id`
    key: str
    now: float
    unix_time: float
    is_live: bool
    is_watched: bool  # from its arrival on
    events: list[EventShape]
    events_left_out: int


class RecordingShape(Struct, frozen=True):
    """A recording that the server writes."""

    name: str
    bytes: int


class RecordingList(Struct, frozen=True):
    """Those that can be picked for a simulation."""

    data: list[RecordingShape]
    object: str = "list"


class SimulationRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Simulate a recorded load under several configurations."""

    configs: Annotated[dict[str, Annotated[str, Meta(max_length=2000)]], Meta(min_length=1, max_length=8)]
    """Names, and options as on the command line."""
    recording: str = ""  # the text of a recording or a step trace
    picked: str = ""  # or the name of one that the server writes
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0  # requests arrive this many times as fast
    ttft_ms: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # targets of goodput; 0: none
    tpot_ms: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 0


class Simulated(Struct, frozen=True):
    """What became of the load under each configuration."""

    machine: dict[str, Any]
    load: dict[str, Any]
    targets: dict[str, float]
    configs: dict[str, dict[str, Any]]
    curves: dict[str, dict[str, Any]]


SIMULATION: msgspec.json.Decoder[SimulationRequest] = msgspec.json.Decoder(SimulationRequest)
