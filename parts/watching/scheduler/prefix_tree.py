"""The prefix cache's tree in readable form: runs of pages without branches are one node. All sizes are bounded.

    root ── [p p p p] ─┬─ [p p]          three nodes, each with its tokens, those below it, its users, its number of
                       └─ [p]            hits, and the time of its last use

The largest subtrees come first. Computed in small parts, between which the scheduler runs.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from penstock.core.kv.page_pool import CacheNode, PrefixCache
from penstock.core.scheduling.scheduler import Scheduler
from penstock.parts.watching.messages import ListPrefixes, PrefixNode, PrefixTree

MAX_TOKENS_SHOWN = 64
MAX_NODES_LOOKED_AT = 500_000
_MAX_NAMESPACE = 64
_PART = 2048
_CLOCKS_KEPT = 4096


class Clock:
    """Converts the prefix cache's clock, which counts events, to seconds, as far as both were noted together."""

    def __init__(self) -> None:
        self._clocks: deque[int] = deque(maxlen=_CLOCKS_KEPT)
        self._times: deque[float] = deque(maxlen=_CLOCKS_KEPT)

    def note(self, clock: int, now: float) -> None:
        """Note both clocks at one moment."""
        if not self._clocks or clock > self._clocks[-1]:
            self._clocks.append(clock)
            self._times.append(now)

    def restart(self) -> None:
        """Forget all: the cache was replaced."""
        self._clocks.clear()
        self._times.clear()

    def time_of(self, clock: int) -> float:
        """Return when that was, or a moment later; 0: outside the noted range."""
        place = bisect_left(self._clocks, clock)
        return self._times[place] if 0 < place < len(self._times) else 0.0


class _Sum(NamedTuple):
    num_pages: int  # in the node and all below it
    num_hits: int


def prefix_tree(
    question: ListPrefixes, scheduler: Scheduler, clock: Clock, now: float
) -> Generator[None, None, PrefixTree]:
    """Yield between parts of the work; return the tree, without nodes that were evicted meanwhile."""
    cache, size = scheduler.kv.cache, scheduler.kv.page_size
    if cache is None:
        return PrefixTree(question.number, now, size, 0, 0, (), True)
    sums: dict[CacheNode, _Sum] = {}
    is_cut = yield from _sum_up(cache, sums)
    roots = cache.roots()
    found: list[PrefixNode] = []
    heap: list[tuple[int, int, CacheNode, int, int]] = []  # pages below (negative), tie, node, parent's place, depth
    for number, root in enumerate(roots):
        heappush(heap, (-_pages(sums, root), number, root, -1, 0))
    tie = len(roots)
    is_whole = not is_cut
    while heap:
        _, _, node, parent, depth = heappop(heap)
        if len(found) >= question.most:
            is_whole = False
            break
        run = _run_from(node)
        last = run[-1]
        found.append(_told(run, parent, sums, size, clock, now))
        if len(found) % 64 == 0:
            yield
        if depth + 1 >= question.depth:
            is_whole = is_whole and not last.children
            continue
        for child in last.children.values():
            tie += 1
            heappush(heap, (-_pages(sums, child), tie, child, len(found) - 1, depth + 1))
    return PrefixTree(question.number, now, size, cache.num_nodes, len(roots), tuple(found), is_whole)


def _sum_up(cache: PrefixCache, sums: dict[CacheNode, _Sum]) -> Generator[None, None, bool]:
    """Sum up pages and hits of each node and all below it; return whether there were too many nodes."""
    order: list[CacheNode] = []
    stack = cache.roots()
    while stack and len(order) < MAX_NODES_LOOKED_AT:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children.values())
        if len(order) % _PART == 0:
            yield
    for count, node in enumerate(reversed(order)):
        below = [sums[child] for child in node.children.values() if child in sums]
        num_pages = (node.page_id >= 0) + sum(each.num_pages for each in below)
        sums[node] = _Sum(num_pages, node.num_hits + sum(each.num_hits for each in below))
        if count % _PART == 0:
            yield
    return bool(stack)


def _pages(sums: dict[CacheNode, _Sum], node: CacheNode) -> int:
    return sums[node].num_pages if node in sums else 0


def _run_from(node: CacheNode) -> Sequence[CacheNode]:
    """Return the nodes up to the next branch, a leaf, or a node with other users."""
    run = [node]
    while node.parent is not None and len(node.children) == 1:
        [child] = node.children.values()
        if child.num_users != node.num_users:
            break
        run.append(child)
        node = child
    return run


def _told(
    run: Sequence[CacheNode], parent: int, sums: dict[CacheNode, _Sum], size: int, clock: Clock, now: float
) -> PrefixNode:
    first, last = run[0], run[-1]
    is_root = first.parent is None
    num_pages, num_hits = sums.get(first, _Sum(len(run), 0))
    num_own = 0 if is_root else len(run)
    keys = [node.key for node in run[: -(-MAX_TOKENS_SHOWN // size)]]
    shown = b"".join(key[: 4 * size] for key in keys if isinstance(key, bytes))  # without the marks of images
    return PrefixNode(
        parent,
        num_own * size,
        max(0, num_pages - num_own) * size,
        first.num_users,
        num_hits,
        now if first.num_users else clock.time_of(first.released_at),
        shown[: 4 * MAX_TOKENS_SHOWN],
        len(last.children),
        str(first.key)[:_MAX_NAMESPACE] if is_root else "",
    )
