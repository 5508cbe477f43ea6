"""Checks the scheduler's whole state against what can be recomputed from scratch. For tests and debugging."""

import itertools
from collections import Counter

from penstock.core.kv.content_keys import page_content
from penstock.core.kv.holder import PageTables
from penstock.core.kv.page_pool import CacheNode
from penstock.core.scheduling.scheduler import Scheduler
from penstock.core.sequences.sequence import Sequence


class InvariantError(AssertionError):
    """The scheduler's bookkeeping is inconsistent."""


def check_invariants(scheduler: Scheduler) -> None:
    """Recompute owners, rows, counters and queues, and compare; O(everything).

    Raises:
        InvariantError: with the first disagreement. (Not an assert statement: it must hold under -O too.)
    """
    _check_queues(scheduler)
    _check_levels(scheduler)
    _check_pages(scheduler)
    _check_tree(scheduler)
    _check_windows(scheduler)
    _check_snapshots(scheduler)
    for seq in scheduler.running:
        _check_sequence(scheduler, seq)
    _check_in_flight(scheduler)
    _check_accounts(scheduler)
    for part in scheduler.parts.all:
        for is_so, what in part.check(scheduler):
            _require(is_so, what)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(what)


def _check_queues(scheduler: Scheduler) -> None:
    running = list(scheduler.running)
    rows = [seq.row for seq in running]
    all_rows = list(range(scheduler.limits.max_num_seqs))
    _require(sorted(rows + scheduler.running.free_rows()) == all_rows, "every row is free or has one sequence")
    num_active = len(scheduler.running.decodes) + len(scheduler.running.prefills)
    _require(num_active <= scheduler.limits.max_num_batched_tokens, "a step has a token for each running row")
    waiting = [seq for request in scheduler.waiting.requests() for seq in request.waiting]
    counted = [seq for seq in waiting if not seq.request.is_paused]
    _require(len(counted) == scheduler.waiting.num_seqs, "the count of waiting sequences")
    num_tokens = sum(seq.num_tokens for seq in counted)
    _require(num_tokens == scheduler.waiting.num_tokens, "the count of waiting tokens")
    _require(scheduler.waiting.num_entries <= 2 * len(waiting) + 65, "entries that are not due are bounded")
    live = running + waiting
    _require(len({id(seq) for seq in live}) == len(live), "a sequence waits or runs, not both")
    requests = scheduler.requests.values()
    _require(sum(len(r.waiting) + len(r.running) for r in requests) == len(live), "requests know their sequences")
    for request in requests:
        _require(request.is_live, "a request without live sequences is forgotten")
        _require(all(seq.row >= 0 for seq in request.running), "running sequences have rows")
        _require(all(seq.row < 0 and not seq.page_ids for seq in request.waiting), "waiting sequences own nothing")
        indices = [seq.sequence_idx for seq in request.waiting]
        _require(indices == sorted(indices), "waiting sequences are in order")
        _require(not (request.is_parked and not request.waiting), "only requests that wait are parked")
        _require(all(seq.is_waiting for seq in request.waiting), "waiting sequences say so")
        _require(not any(seq.is_waiting or seq.is_new for seq in request.running), "running ones had their turn")
        _require(not (request.is_paused and (request.running or request.is_parked)), "a paused request only waits")
        is_aside = request.is_paused or request.is_parked
        has_new = any(seq.is_new for seq in request.waiting)
        _require(request.is_lined_up == (has_new and not is_aside), "new sequences are in line")
        returning = [seq for seq in request.waiting if not seq.is_new]
        _require(is_aside or all(seq.is_returning for seq in returning), "others are to return")
    _check_counts(scheduler, counted)


def _check_levels(scheduler: Scheduler) -> None:
    in_line = list(scheduler.waiting.lines())
    _require(all(request.level == level for level, request in in_line), "requests are in line on their level")
    lined_up = [request for request in scheduler.requests.values() if request.is_lined_up]
    _require({id(request) for _, request in in_line} == set(map(id, lined_up)), "those in line say so")
    _require(len(in_line) == len(lined_up), "a request is in line once")


def _check_counts(scheduler: Scheduler, counted: list[Sequence]) -> None:
    groups: dict[str, Counter[str]] = {}
    for seq in (each for each in counted if not each.request.gives_way):
        groups.setdefault(seq.request.tenant, Counter())[seq.request.group] += 1
    expected = {(name, found.total(), len(found)) for name, found in groups.items()}
    found = {(each.tenant, each.num_seqs, each.num_groups) for each in scheduler.waiting.tenants()}
    _require(found == expected, "the counts of each tenant")


def _holders(scheduler: Scheduler) -> list[PageTables]:
    """The holders of pages other than sequences."""
    return [holder for part in scheduler.parts.all for holder in part.holders()]


def _check_pages(scheduler: Scheduler) -> None:
    pool = scheduler.kv.pool
    num_users = [0] * pool.num_pages
    for seq in scheduler.running:
        for page_id in itertools.chain(seq.page_ids, *(table.page_ids for table in seq.window_tables)):
            num_users[page_id] += 1
    for holder in _holders(scheduler):
        for page_id in itertools.chain(holder.page_ids, *(table.page_ids for table in holder.window_tables)):
            num_users[page_id] += 1
    num_nodes = [0] * pool.num_pages
    if scheduler.kv.cache is not None:
        for node in scheduler.kv.cache.nodes():
            if node.parent is not None:
                num_nodes[node.page_id] += 1
    for group in scheduler.kv.windows:
        for _, _, page_id in group.cached():
            num_nodes[page_id] += 1
    num_free = [0] * pool.num_pages
    for page_id in pool.free_page_ids():
        num_free[page_id] += 1
    _require(pool.user_counts() == num_users, "every page counts the page tables that it is in")
    _require(pool.cached_flags() == num_nodes, "every page knows the one node that it belongs to")
    is_free = [int(not users and not nodes) for users, nodes in zip(num_users, num_nodes, strict=True)]
    _require(num_free == is_free, "every page is either owned or free, once")
    _require(pool.num_used == pool.num_pages - num_users.count(0), "the count of used pages")
    _require(pool.num_free + pool.num_cached + pool.num_used == pool.num_pages, "the sum of all pages")


def _check_tree(scheduler: Scheduler) -> None:
    cache = scheduler.kv.cache
    if cache is None:
        return
    cursors: Counter[CacheNode] = Counter(seq.cache_node for seq in scheduler.running if seq.cache_node is not None)
    cursors.update(holder.cache_node for holder in _holders(scheduler) if holder.cache_node is not None)
    nodes = list(cache.nodes())
    users = dict(cursors)
    for node in reversed(nodes):  # children before parents
        if node.parent is not None and users.get(node):
            users[node.parent] = users.get(node.parent, 0) + 1
    for node in nodes:
        _require(node.num_users == users.get(node, 0), "a node counts its cursors and its children in use")
        if node.parent is None:
            _require(bool(node.children or node.num_users), "an empty namespace is forgotten")
        else:
            is_leaf = not node.children and not node.num_users
            _require(node.is_queued or not is_leaf, "an unused leaf can be evicted")
    pages = [node for node in nodes if node.parent is not None]
    num_users = scheduler.kv.pool.user_counts()
    _require(cache.num_nodes == len(pages), "the count of nodes")
    _require(cache.num_evictable == sum(not node.num_users for node in pages), "the count of evictable nodes")
    _require(cache.heap_size <= len(pages), "the eviction heap is no larger than the tree")
    for node in pages:
        if not node.num_users:
            _require(num_users[node.page_id] == 0, "evicting a node frees its page")


def _check_windows(scheduler: Scheduler) -> None:
    kv, num_users = scheduler.kv, scheduler.kv.pool.user_counts()
    nodes = set(kv.cache.nodes()) if kv.cache is not None else set()
    for number, group in enumerate(kv.windows):
        cached = group.cached()
        _require(all(node in nodes for node, _, _ in cached), "cached pages belong to nodes of the tree")
        _require(len({(node, i) for node, i, _ in cached}) == len(cached), "a node has each page once")
        idle = {page_id for _, _, page_id in cached if not num_users[page_id]}
        _require(set(group.idle) == idle, "cached pages in no page table are idle")
        _require(list(group.idle.values()) == sorted(group.idle.values()), "the longest idle first")
        for seq in scheduler.running:
            name, table = f"{seq.request_id}/{seq.sequence_idx}", seq.window_tables[number]
            _require(table.num_pages * group.page_size >= seq.num_computed_tokens, f"{name}: has its pages")
            _require(table.first <= group.first_needed(seq.num_settled_tokens), f"{name}: keeps what may be needed")
            num_late = 0 if seq in scheduler.running.prefills else kv.page_size  # it goes when a page is full
            border = max(0, seq.num_settled_tokens - num_late)
            _require(table.first >= group.first_needed(border), f"{name}: frees what is behind its window")


def _check_snapshots(scheduler: Scheduler) -> None:
    if (snapshots := scheduler.kv.snapshots) is None:
        return
    of_nodes, of_sequences, free = snapshots.held()
    places = [*of_nodes.values(), *of_sequences, *free]
    _require(sorted(places) == list(range(snapshots.num_places)), "each snapshot's place has one owner, or is free")
    assert scheduler.kv.cache is not None
    nodes = {node for node in scheduler.kv.cache.nodes() if node.parent is not None}
    _require(of_nodes.keys() <= nodes, "snapshots belong to nodes of the tree")


def _check_sequence(scheduler: Scheduler, seq: Sequence) -> None:
    page_size = scheduler.kv.page_size
    name = f"{seq.request_id}/{seq.sequence_idx}"
    _require(seq.running_epoch == seq.epoch, f"{name}: epoch")
    _require(0 <= seq.num_settled_tokens <= seq.num_computed_tokens, f"{name}: settled <= computed")
    _require(
        seq.num_computed_tokens <= min(len(seq.page_ids) * page_size, seq.max_computed_tokens), f"{name}: has its pages"
    )
    _require(seq.num_tokens < seq.max_len, f"{name}: not finished")
    _require(len(set(seq.page_ids)) == len(seq.page_ids), f"{name}: each page once")
    in_flight = [
        (num_new, max_tokens)
        for step in scheduler.in_flight
        for entry, epoch, num_new, max_tokens in [
            *((s, e, n, n) for s, e, n in zip(step.decodes.seqs, step.decodes.epochs, step.decode_sizes, strict=True)),
            *((c.seq, c.epoch, c.num_new, int(c.samples)) for c in step.chunks),
        ]
        if entry is seq and epoch == seq.epoch
    ]
    _require(seq.num_inflight_tokens == sum(num_new for num_new, _ in in_flight), f"{name}: tokens in flight")
    num_samples = sum(max_tokens for _, max_tokens in in_flight)
    num_unsure = sum(num_new for num_new, max_tokens in in_flight if max_tokens > 1)
    _require(seq.num_unsure_tokens == num_unsure, f"{name}: tokens of drafts in flight")
    target = seq.num_tokens + num_samples
    _require(target <= seq.max_len, f"{name}: no sample beyond its length")
    if seq in scheduler.running.prefills:
        _require(num_samples == 0 and seq.num_computed_tokens < target, f"{name}: prefill")
    else:
        _require(seq.num_computed_tokens == target - 1, f"{name}: decode")
    if seq.settle_event:
        next_step = scheduler.in_flight[0].step_id if scheduler.in_flight else scheduler.totals.num_steps
        _require(seq.num_unsettled_tokens == 1, f"{name}: all but the last token is settled")
        _require(scheduler.settling.calendar.has(seq), f"{name}: is looked at again")
        num_before = seq.due_step - next_step  # results before the one that is looked at
        _require(0 <= num_before < seq.settle_event - seq.num_settled_tokens, f"{name}: is looked at in time")
    if scheduler.kv.cache is None:
        _require(seq.cache_node is None and not seq.num_tree_pages, f"{name}: no cursor without a cache")
        return
    node, path = seq.cache_node, list[bytes]()
    while node is not None and node.parent is not None:
        _require(isinstance(node.key, bytes), "keys are tokens")
        path.append(bytes(node.key) if isinstance(node.key, bytes) else b"")
        node = node.parent
    _require(node is not None and node.key == seq.request.namespace, f"{name}: namespace")
    _require(len(path) == seq.num_tree_pages, f"{name}: depth of the cursor")
    _require(seq.num_tree_pages * page_size <= seq.num_settled_tokens, f"{name}: only settled pages are cached")
    known = [page_content(seq, index, page_size) for index in range(len(path))]
    _require(path[::-1] == known, f"{name}: the cursor's path is its tokens")


def _check_in_flight(scheduler: Scheduler) -> None:
    _require(len(scheduler.in_flight) <= scheduler.max_in_flight, "the pipeline's depth")
    for step in scheduler.in_flight:
        samples = len(step.decodes.seqs) + sum(chunk.samples for chunk in step.chunks)
        _require(samples == step.num_samples, "samples of a step in flight")


def _check_accounts(scheduler: Scheduler) -> None:
    contexts = scheduler.accounts.contexts()
    decodes = {seq for seq in scheduler.running if seq.num_settled_tokens == seq.num_tokens - 1 and seq.num_outputs}
    _require(set(contexts) == {seq for seq in decodes if seq.settle_event}, "an account for each row that decodes")
    for seq, context in contexts.items():
        _require(context == seq.num_settled_tokens, f"{seq.request_id}/{seq.sequence_idx}: context in its account")
