"""A map of the KV pool's pages and their owners. Computed in small parts, between which the scheduler runs.

    pages    0 1 2 3 4 5 6 7 8 9 ...        owners    a a s s b b b c c f       s: several tables, c: cached, f: free
    runs     (a, 2) (s, 2) (b, 3) (c, 2) (f, 1)

In a pool with more than `MAX_CELLS` pages, several pages make a cell, which shows the state of most of them.
"""

from array import array
from collections import Counter
from collections.abc import Generator
from collections.abc import Sequence as ListOf
from itertools import groupby
from typing import Literal

from penstock.core.kv.kv_pages import KVPages
from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.sequences.sequence import Sequence
from penstock.ipc.codec import pack_int32
from penstock.parts.watching.messages import CACHED, FREE, HELD, OWNED, SHARED, PageMap, PageRuns

MAX_CELLS = 4096
MAX_OWNERS = 2048
"""Most owners that are named; pages of further ones are shown as held."""

_PART = 4096
"""Pages per part of the work: half a millisecond."""

_NAMES = {FREE: "free", CACHED: "cached", SHARED: "shared", HELD: "held"}


def page_map(number: int, scheduler: Scheduler) -> Generator[None, None, PageMap]:
    """Yield between parts of the work; return the map."""
    kv = scheduler.kv
    owners: list[tuple[str, int, int]] = []
    of_page = array("i", bytes(4 * kv.pool.num_pages))  # FREE at first; then states and owners
    groups = array("i", [-1]) * kv.pool.num_pages
    num_done = 0
    for seq in list(scheduler.running):
        if seq.row < 0 or scheduler.kv is not kv:
            continue  # it has left meanwhile, or the worker was replaced
        tables = [seq.page_ids, *(table.page_ids for table in seq.window_tables)]
        code = OWNED + len(owners) if len(owners) < MAX_OWNERS else HELD
        if code != HELD:
            owners.append((seq.request_id, seq.sequence_idx, sum(map(len, tables))))
        for group, page_ids in enumerate(tables):
            for page_id in page_ids[:]:
                of_page[page_id] = code if of_page[page_id] in (FREE, code) else SHARED
                groups[page_id] = group
            num_done += len(page_ids)
        if num_done >= _PART:
            num_done = 0
            yield
    yield from _without_tables(kv, of_page, groups)
    tiers = [(yield from _runs("device", of_page, groups))]
    if kv.tiers is not None:
        host = kv.tiers.host
        states = array("i", bytes(4 * host.num_pages))
        for start in range(0, host.num_pages, _PART):
            for page in range(start, min(start + _PART, host.num_pages)):
                states[page] = HELD if host.is_held(page) else CACHED if host.key_of(page) else FREE
            yield
        for holder, swapped in list(kv.tiers.swapped.items()):
            if isinstance(holder, Sequence) and len(owners) < MAX_OWNERS:
                owners.append((holder.request_id, holder.sequence_idx, 0))
                for page in swapped.all_pages:
                    states[page] = OWNED + len(owners) - 1
                yield
        tiers.append((yield from _runs("host", states, None)))
    return PageMap(number, kv.page_size, tuple(owners), tuple(tiers), dict(scheduler.parts.tier()))


def _without_tables(kv: KVPages, of_page: "array[int]", groups: "array[int]") -> Generator[None, None, None]:
    """Add pages that only the prefix cache owns, and those in tables of holders that do not run."""
    pool = kv.pool
    for start in range(0, pool.num_pages, _PART):
        for page_id in range(start, min(start + _PART, pool.num_pages)):
            if of_page[page_id] == FREE:
                if pool.num_users(page_id):
                    of_page[page_id] = HELD  # of a sequence that has just come, or of a handover
                elif pool.is_cached(page_id):
                    of_page[page_id] = CACHED
                    groups[page_id] = next((i for i, group in enumerate(kv.windows, 1) if group.has(page_id)), 0)
        yield


def _runs(
    tier: Literal["device", "host"], states: ListOf[int], groups: "array[int] | None"
) -> Generator[None, None, PageRuns]:
    """Return the cells, run-length encoded."""
    num_pages = len(states)
    cell = max(1, -(-num_pages // MAX_CELLS))
    counts: Counter[int] = Counter()
    for start in range(0, num_pages, _PART):
        counts.update(states[start : start + _PART])
        yield
    cells: list[tuple[int, int]] = []
    for start in range(0, num_pages, cell):
        part = states[start : start + cell]
        code = part[0] if cell == 1 else Counter(part).most_common(1)[0][0]
        cells.append((code, -1 if groups is None else groups[start + list(part).index(code)]))
        if start % _PART < cell:
            yield
    runs = [(code, group, sum(1 for _ in same)) for (code, group), same in groupby(cells)]
    columns = [pack_int32(column) for column in zip(*runs, strict=True)] or [b"", b"", b""]
    num_owned = sum(count for code, count in counts.items() if code >= OWNED)
    told = {name: counts[code] for code, name in _NAMES.items()} | {"owned": num_owned}
    return PageRuns(tier, num_pages, cell, columns[0], columns[1], columns[2], told)
