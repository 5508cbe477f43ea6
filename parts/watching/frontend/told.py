"""Turns an engine's messages into the shapes in which they are reported."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from penstock.frontend.text.tokenizer import TextTokenizer
from penstock.ipc.codec import unpack_int32
from penstock.parts.watching.frontend.shapes import (
    EventShape,
    LifeShape,
    OwnerShape,
    PageMapShape,
    PictureShape,
    PrefixShape,
    PrefixTreeShape,
    RowShape,
    StepShape,
    StepsShape,
    TierShape,
    WaitingShape,
)
from penstock.parts.watching.messages import (
    CACHED,
    FREE,
    HELD,
    OWNED,
    SHARED,
    PageMap,
    PageRuns,
    Picture,
    PrefixTree,
    RequestLife,
    SequenceEvent,
    WatchedStep,
    WatchedSteps,
)

_STATES = {FREE: "free", CACHED: "cached", SHARED: "shared", HELD: "held"}


def key_of(wire_id: str) -> str:
    """A request's key: its wire id without the frontend's name and the attempt's number."""
    return wire_id.partition(":")[2].partition("#")[0] or wire_id


def id_of(wire_id: str) -> str:
    """The id of the HTTP request: `x-request-id`."""
    return key_of(wire_id).partition(":")[2] or key_of(wire_id)


class StepReader:
    """Reads the messages of one engine in their order."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # of the step reported last
        self._ranges: list[tuple[int, int]] = []  # of that step's decodes

    def read(self, message: WatchedSteps, engine: str) -> StepsShape:
        """A message in the form in which it is reported."""
        steps = [self._step(step) for step in message.steps]
        return StepsShape(
            engine=engine,
            number=message.number,
            now=message.now,
            unix_time=message.unix_time,
            steps=steps,
            left_out=message.num_left_out,
            events=events(message.events),
            events_left_out=message.num_events_left_out,
            queue=[
                WaitingShape(
                    key_of(each.request_id), each.sequence_idx, each.since, each.num_prompt_tokens, each.reason
                )
                for each in message.waiting
            ],
            num_waiting=message.num_waiting,
            reasons=message.reasons,
            totals=message.totals,
            picture=None if message.picture is None else _picture(message.picture),
        )

    def _step(self, step: WatchedStep) -> StepShape:
        if not step.is_same:
            self._rows = unpack_int32(step.rows).tolist()
            self._ranges = list(ranges(self._rows[: step.num_decodes]))
        decodes, counts = self._rows[: step.num_decodes], unpack_int32(step.chunks)
        guesses: list[tuple[int, int, int]] = []
        if step.guessed_tokens:
            guessed = unpack_int32(step.guessed_tokens)
            returned = unpack_int32(step.returned_tokens) if step.returned_tokens else [1] * len(guessed)
            guesses = [each for each in zip(decodes, guessed, returned, strict=False) if each[1]]
        return StepShape(
            step.step_id,
            step.num_left_out,
            step.sent,
            step.returned,
            step.schedule_us,
            step.forward_us,
            step.idle_us,
            self._ranges,
            list(zip(self._rows[step.num_decodes :], counts, strict=False)),
            guesses,
            step.num_waiting,
            step.free_pages,
            step.cached_pages,
            step.host_pages,
            step.to_host,
            step.from_host,
        )


def ranges(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The rows, in order, as ranges (first, last)."""
    for _, same in groupby(enumerate(sorted(rows)), lambda each: each[1] - each[0]):
        found = [row for _, row in same]
        yield found[0], found[-1]


def events(told: Iterable[SequenceEvent]) -> list[EventShape]:
    """Events of sequences."""
    return [
        EventShape(
            each.at, each.kind, key_of(each.request_id), each.sequence_idx, each.row, each.tokens, each.more, each.text,
            each.until,
        )
        for each in told
    ]  # fmt: skip


def life(told: RequestLife, engine: str) -> LifeShape:
    """What has happened to a request."""
    return LifeShape(
        engine, id_of(told.request_id), key_of(told.request_id), told.now, told.unix_time, told.is_live,
        told.is_watched, events(told.events), told.num_left_out,
    )  # fmt: skip


def page_map(told: PageMap, engine: str) -> PageMapShape:
    """Who owns the pages."""
    owners = [OwnerShape(key_of(request_id), idx, pages) for request_id, idx, pages in told.owners]
    return PageMapShape(engine, told.page_size, owners, [_tier(runs) for runs in told.tiers], told.disk)


def prefix_tree(told: PrefixTree, engine: str, tokenizer: TextTokenizer) -> PrefixTreeShape:
    """The prefix cache, with the text of its prefixes. Takes some milliseconds, so keep it off the event loop."""
    nodes = [
        PrefixShape(
            each.parent,
            each.num_tokens,
            each.num_tokens_below,
            each.num_users,
            each.num_hits,
            round(max(0.0, told.now - each.last_used), 1) if each.last_used else None,
            tokenizer.decode(unpack_int32(each.token_ids).tolist()) if each.token_ids else "",
            each.num_children,
            each.namespace,
        )
        for each in told.nodes
    ]
    return PrefixTreeShape(engine, told.page_size, told.num_pages, told.num_namespaces, nodes, told.is_whole)


def _picture(told: Picture) -> PictureShape:
    running = [
        RowShape(
            each.row, key_of(each.request_id), each.sequence_idx, each.since, each.num_prompt_tokens,
            each.num_computed_tokens, each.num_output_tokens,
        )
        for each in told.running
    ]  # fmt: skip
    sizes = told.num_rows, told.num_pages, told.page_size, told.num_host_pages, told.num_disk_places
    return PictureShape(*sizes, running, told.num_running)


def _tier(told: PageRuns) -> TierShape:
    columns = (unpack_int32(column) for column in (told.codes, told.groups, told.lengths))
    runs = [
        (_STATES.get(code, "owned"), code - OWNED if code >= OWNED else -1, group, length)
        for code, group, length in zip(*columns, strict=True)
    ]
    return TierShape(told.tier, told.num_pages, told.cell, runs, told.counts)
