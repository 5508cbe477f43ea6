"""What a scheduler does, for people who watch it: collected only while a frontend asks for it.

A frontend that wants to see steps sends `WatchSteps`, and repeats it before its lease is over; `WatchedSteps` come a
few times a second. The other three are questions with one answer each. Times are seconds of the scheduler's clock.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.ipc.messages.base import AnyAnswer, AnyQuestion, Buffer, Message, ShortText


class WatchSteps(Message, frozen=True):
    """Asks for reports of steps from now on. The next message has a complete picture (`Picture`)."""

    lease: Annotated[float, Meta(ge=0, le=60)]  # seconds; 0: stop reporting


class WatchedStep(Struct, frozen=True, array_like=True, gc=False):
    """One step that was planned and has returned. Decodes come first in its batch, then prompt chunks."""

    step_id: int
    num_left_out: int  # steps between this one and the last reported one
    sent: float
    returned: float
    schedule_us: int  # time that planning took
    forward_us: int
    idle_us: int  # time that the device waited before it
    num_decodes: int
    rows: Buffer  # int32[N]; empty with `is_same`
    is_same: bool  # `rows` and `num_decodes` are as in the step reported before
    chunks: Buffer = b""  # int32[N - num_decodes]: tokens of each chunk
    returned_tokens: Buffer = b""  # int32[>= num_decodes]: tokens of each decode; empty: one each
    guessed_tokens: Buffer = b""  # int32[>= num_decodes]; empty: none
    num_waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    host_pages: tuple[int, int] = (0, 0)  # free, cached
    to_host: int = 0  # pages copied
    from_host: int = 0


EventKind = Literal[
    "arrived",
    "waited",
    "admitted",
    "chunk",
    "first token",
    "preempted",
    "paused",
    "resumed",
    "finished",
    "worker lost",
]


class SequenceEvent(Struct, frozen=True, array_like=True, gc=False):
    """An event in a sequence's life.

    kind          tokens                      more                       text
    arrived       of the prompt               sequences
    waited                                                               why, as of its end; it lasted until `until`
    admitted      known                       of them not computed       "swapped in", "fork", or nothing
    chunk         of this step                of them before this step
    first token   returned
    preempted     output so far                                          why; "swapped: " and why
    finished      output                                                 why; "error: ", its code and its sentence
    """

    at: float
    kind: EventKind
    request_id: str  # empty: of all
    sequence_idx: int = 0
    row: int = -1
    tokens: int = 0
    more: int = 0
    text: str = ""
    until: float = 0.0


class InRow(Struct, frozen=True, array_like=True, gc=False):
    """A sequence that has a row."""

    row: int
    request_id: str
    sequence_idx: int
    since: float  # of its request's arrival; 0: unknown
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int


class Waiting(Struct, frozen=True, array_like=True, gc=False):
    """A sequence that waits, and why."""

    request_id: str
    sequence_idx: int
    since: float  # of its request's arrival; 0: unknown
    num_prompt_tokens: int
    reason: str


class Picture(Struct, frozen=True, array_like=True):
    """Everything that cannot be derived from earlier reports."""

    num_rows: int
    num_pages: int
    page_size: int
    num_host_pages: int
    num_disk_places: int
    running: tuple[InRow, ...]
    num_running: int  # including those that `running` has no room for


class WatchedSteps(Message, frozen=True):
    """What has happened since the last such message. Its size, and the bytes sent in a second, are limited."""

    number: int  # one more than in the last message to the same frontends
    now: float
    unix_time: float  # the same moment
    steps: tuple[WatchedStep, ...]
    num_left_out: int  # steps that had no room
    events: tuple[SequenceEvent, ...]
    num_events_left_out: int
    waiting: tuple[Waiting, ...]  # the first ones, by their turns
    num_waiting: int
    reasons: dict[str, int]  # why sequences wait, and how many
    totals: dict[str, int]  # counters since the start
    picture: Picture | None = None


class ListPages(AnyQuestion, frozen=True):
    """Asks which sequences own the KV pool's pages; `PageMap` answers."""


class PageRuns(Struct, frozen=True, array_like=True):
    """The pages of a tier, in cells of equal size, run-length coded. A cell shows the state of most of its pages.

    A code is a state of FREE, CACHED, SHARED, HELD, or OWNED plus the place of an owner in `PageMap.owners`.
    """

    tier: Literal["device", "host"]
    num_pages: int
    cell: int  # pages in a cell
    codes: Buffer  # int32[R]
    groups: Buffer  # int32[R]: page groups, from 0; -1: none
    lengths: Buffer  # int32[R]: cells
    counts: dict[str, int]  # pages in each state, exactly


FREE, CACHED, SHARED, HELD, OWNED = 0, 1, 2, 3, 8


class PageMap(AnyAnswer, frozen=True):
    """Who owns the pages. It is collected between steps, so the parts of a large pool are from different moments."""

    page_size: int
    owners: tuple[tuple[str, int, int], ...]  # request, sequence, pages on the device
    tiers: tuple[PageRuns, ...]
    disk: dict[str, int]  # places in each state; empty: there is no disk tier


class ListPrefixes(AnyQuestion, frozen=True):
    """Asks for the prefix cache's tree; `PrefixTree` answers."""

    depth: Annotated[int, Meta(ge=1, le=64)] = 16  # nodes from the root
    most: Annotated[int, Meta(ge=1, le=2000)] = 400  # nodes


class PrefixNode(Struct, frozen=True, array_like=True):
    """A run of pages without branches."""

    parent: int  # index of the parent in the list; -1: none
    num_tokens: int
    num_tokens_below: int  # tokens in all of its continuations
    num_users: int  # running sequences that hold it, or a continuation of it
    num_hits: int  # admissions that found it, or a continuation of it
    last_used: float  # 0: before the scheduler was watched; now, if it has users
    token_ids: Buffer  # int32[<= 64]: its first tokens
    num_children: int  # including those that the list has no room for
    namespace: str = ""  # of a root: a salt, or whatever else separates prefixes


class PrefixTree(AnyAnswer, frozen=True):
    """The largest parts of the prefix cache's tree, parents first."""

    now: float
    page_size: int
    num_pages: int  # of all nodes, including those left out
    num_namespaces: int
    nodes: tuple[PrefixNode, ...]
    is_whole: bool  # nothing was left out


class ShowLife(AnyQuestion, frozen=True):
    """Asks what has happened to a request; `RequestLife` answers."""

    request_id: ShortText  # a part of it is enough


class RequestLife(AnyAnswer, frozen=True):
    """Events of one request in order, from its arrival on if it was already watched then."""

    now: float
    unix_time: float
    request_id: str  # empty: it is not known
    events: tuple[SequenceEvent, ...]
    num_left_out: int  # in the middle
    is_live: bool
    is_watched: bool  # from its arrival on; otherwise only its current state is known


Question = ListPages | ListPrefixes | ShowLife
Answer = PageMap | PrefixTree | RequestLife

FROM_FRONTEND = (WatchSteps, ListPages, ListPrefixes, ShowLife)
TO_FRONTEND = (WatchedSteps, PageMap, PrefixTree, RequestLife)
