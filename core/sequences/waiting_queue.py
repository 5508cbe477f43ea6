"""Waiting sequences, and whose turn it is. The work per step does not grow with their number.

    1. by level (usually all are on one; a policy gives keys): the lowest first;
    2. in a level, sequences that had a row and lost it, in the order in which they first got one;
    3. then new ones, in turns: one sequence of each tenant, and within a tenant one of each of its groups.

A tenant is an API key; a group is what one client asked for at once. After its turn, each goes to the end of its line.
So a group of one sequence waits as in a plain queue, and a group of a thousand does not hold up the others for long.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import Protocol

from penstock.core.sequences.sequence import Key, Request, Sequence
from penstock.ipc.messages import WaitingTenant
from penstock.ipc.queue_turns import WaitingCounts

_by_idx = attrgetter("sequence_idx")

Rows = Mapping[str, Mapping[str, int]]
"""How many rows each group of each tenant has; groups and tenants without rows are left out."""

_Group = OrderedDict[Request, None]
_Tenant = OrderedDict[str, _Group]


class TenantOrder(Protocol):
    """An order of tenants other than taking turns."""

    def first_tenant(self, tenants: Collection[str]) -> str:
        """Return whose turn it is."""

    def tenant_waits(self, tenant: str, tenants: Collection[str]) -> None:
        """A tenant joins the others."""


class _Lines:
    """The new sequences of one level: tenants, their groups, and the requests of a group, each in line."""

    __slots__ = ("_order", "_tenants")

    def __init__(self, order: TenantOrder | None) -> None:
        self._order = order
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if self._order is not None and tenant not in self._tenants:
            self._order.tenant_waits(tenant, self._tenants.keys())
        self._tenants.setdefault(tenant, OrderedDict()).setdefault(request.group, OrderedDict())[request] = None

    def remove(self, request: Request) -> None:
        groups = self._tenants[request.tenant]
        requests = groups[request.group]
        del requests[request]
        if not requests:
            del groups[request.group]
            if not groups:
                del self._tenants[request.tenant]

    def first(self) -> Request:
        """Return the request whose turn it is."""
        order = self._order
        first = next(iter(self._tenants)) if order is None else order.first_tenant(self._tenants.keys())
        groups = self._tenants[first]
        return next(iter(next(iter(groups.values()))))

    def had_turn(self, request: Request) -> None:
        """Move its tenant, its group and the request itself to the end of their lines."""
        groups = self._tenants[request.tenant]
        self._tenants.move_to_end(request.tenant)
        groups.move_to_end(request.group)
        groups[request.group].move_to_end(request)

    def without_row(self, rows_of: Rows) -> Request | None:
        """Return the first request whose tenant has no row, else whose group has none; None if all have one."""
        tenants: Mapping[str, _Tenant] = self._tenants
        if self._order is not None:  # only the tenant whose turn it is may take a row from others
            first = self._order.first_tenant(self._tenants.keys())
            tenants = {first: self._tenants[first]}
        for name, groups in tenants.items():
            if name not in rows_of:
                return next(iter(next(iter(groups.values()))))
        for name, groups in tenants.items():
            for group, requests in groups.items():
                if group not in rows_of[name]:
                    return next(iter(requests))
        return None

    def bring_forward(self, request: Request) -> None:
        """Give a request the next turn."""
        groups = self._tenants[request.tenant]
        self._tenants.move_to_end(request.tenant, last=False)
        groups.move_to_end(request.group, last=False)
        groups[request.group].move_to_end(request, last=False)

    def requests(self) -> Iterator[Request]:
        """Yield the requests, line by line."""
        return (request for groups in self._tenants.values() for group in groups.values() for request in group)

    def in_order(self) -> Iterator[Sequence]:
        """Yield all new sequences in the order of their turns. O(all) for the first one: only for the step trace."""
        tenants = [
            [[[seq for seq in request.waiting if seq.is_new] for request in group] for group in groups.values()]
            for groups in self._tenants.values()
        ]
        yield from _in_turns([list(_in_turns([list(_in_turns(group)) for group in groups])) for groups in tenants])


def _in_turns(lists: list[list[Sequence]]) -> Iterator[Sequence]:
    for i in range(max(map(len, lists), default=0)):
        yield from (each[i] for each in lists if i < len(each))


class WaitingQueue:
    """All waiting sequences.

    A request whose sequences wait for a sibling to compute their common prompt is parked beside the lines, so that it
    does not hold up those behind it. The same holds for one that must wait until it is known which request crashed a
    worker.
    A request for which a part awaits something, such as its grammar, is held until the part releases it.
    A request whose client does not read is paused: it does not count as waiting until it resumes.
    Outdated entries of `_returning` are dropped when they reach the top, or all at once when they are the majority.
    """

    __slots__ = (
        "_counts", "_groups", "_held", "_level_ids", "_levels", "_num_turns", "_parked", "_paused", "_returning",
        "num_changes", "num_seqs", "num_tokens", "order",
    )  # fmt: skip

    def __init__(self) -> None:
        self.order: TenantOrder | None = None
        """Decides between the tenants on a level; None: they take turns. Set it while nothing waits."""
        self._levels: dict[Key, _Lines] = {}
        self._level_ids: list[Key] = []  # sorted
        self._returning: list[tuple[Key, int, Sequence]] = []  # heap: level, turn
        self._parked: dict[Request, None] = {}
        self._held: dict[Request, str] = {}  # like parked, but `release` ends it; with the reason
        self._paused: dict[Request, None] = {}
        self._counts = WaitingCounts()
        self._groups: dict[tuple[str, str], int] = {}  # number of sequences by tenant and group
        self._num_turns = 0
        self.num_seqs = 0
        self.num_tokens = 0  # known tokens, prompts and outputs, of all waiting sequences
        self.num_changes = 0  # requests that joined, and new orders: while it stays, so does who waits for a row

    def add_request(self, request: Request) -> None:
        """Queue a new request with all its sequences. Those with outputs of an earlier scheduler had their turn."""
        for seq in request.waiting:
            seq.is_waiting = True
            if seq.num_outputs:
                self._give_turn(seq)
        self._count_all(request)
        self._line_up(request)

    def put_back(self, seq: Sequence, *, at_end: bool = False) -> None:
        """Queue a sequence that ran: at its place in the order, or `at_end` of the line of new ones."""
        request = seq.request
        insort(request.waiting, seq, key=_by_idx)
        seq.is_waiting = True
        self._count(seq, 1)
        if at_end:
            _forget_turn(seq)
            if not request.is_parked and not request.is_lined_up:
                self._line_up(request)
        elif not request.is_parked:
            self._return(seq)

    def head(self) -> Sequence | None:
        """Return the sequence whose turn it is, or None."""
        heap = self._returning
        while heap and not _is_due(heap[0]):
            _drop(heappop(heap))
        if heap and (not self._level_ids or heap[0][0] <= self._level_ids[0]):
            return heap[0][2]
        if not self._level_ids:
            return None
        request = self._levels[self._level_ids[0]].first()
        return next(seq for seq in request.waiting if seq.is_new)

    def without_row(self, rows_of: Rows) -> Sequence | None:
        """Return the first new sequence of a tenant or group without a row; None unless the head is new too."""
        head = self.head()
        if head is None or not head.is_new:
            return None
        request = self._levels[head.request.level].without_row(rows_of)
        return None if request is None else next(seq for seq in request.waiting if seq.is_new)

    def bring_forward(self, seq: Sequence) -> None:
        """Give the next turn to this new sequence, which must be on the head's level."""
        self._levels[seq.request.level].bring_forward(seq.request)

    def admit(self, seq: Sequence) -> None:
        """Take out the head, which gets a row."""
        request = seq.request
        if seq.is_new:
            self._give_turn(seq)
            if request.is_lined_up:
                self._levels[request.level].had_turn(request)
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Take out a waiting sequence that is admitted, aborted or failed."""
        request = seq.request
        request.waiting.remove(seq)
        seq.is_waiting = False
        if request.is_paused:
            if not request.waiting:
                del self._paused[request]
                request.is_paused = False
            return
        self._count(seq, -1)
        if request.is_parked and not request.waiting:
            self._leave_side(request)
        if request.is_lined_up and not any(each.is_new for each in request.waiting):
            self._leave_line(request)
        if len(self._returning) > 2 * self.num_seqs + 64:
            self._compact()

    def park(self, request: Request) -> None:
        """Set a request aside."""
        self._set_aside(request)
        self._parked[request] = None

    def parked(self) -> list[Request]:
        """Return the requests set aside: at most as many as rows, except while suspects of a crash are tried."""
        return list(self._parked)

    def unpark(self, request: Request) -> None:
        self._leave_side(request)
        self._line_up(request)

    def hold(self, request: Request, why: str) -> None:
        """Set a request aside until `release`; unlike a parked one, it is not examined in between.

        `why`: a kind of reason (`core/scheduling/step_record.py`).
        """
        self._set_aside(request)
        self._held[request] = why

    def release(self, request: Request) -> bool:
        """Queue a held request again, at the head of its line. Returns whether it was held."""
        if request not in self._held:
            return False
        self.unpark(request)
        if request.is_lined_up:  # its turn had already come
            self._levels[request.level].bring_forward(request)
        return True

    def release_all(self) -> None:
        """Queue all held requests again: nobody else will."""
        for request in reversed(list(self._held)):
            self.release(request)

    def is_held(self, request: Request) -> bool:
        return request in self._held

    def held(self) -> Mapping[Request, str]:
        """Return the requests that wait to be released, each with the reason."""
        return self._held

    def pause(self, request: Request) -> None:
        """Set aside, until `resume`, a request that has no running sequence."""
        for seq in request.waiting:
            self._count(seq, -1)
        if request.is_parked:
            self._leave_side(request)
        if request.is_lined_up:
            self._leave_line(request)
        request.is_paused = True
        self._paused[request] = None

    def resume(self, request: Request) -> None:
        """Queue a paused request again, after all that are waiting already, because it has kept the engine waiting."""
        del self._paused[request]
        request.is_paused = False
        for seq in request.waiting:
            _forget_turn(seq)
        self._count_all(request)
        self._line_up(request)

    def change_level(self, request: Request, level: Key) -> None:
        """Give a request another level, as the last in line there; sequences that had their turn keep their order."""
        is_lined_up = request.is_lined_up
        if is_lined_up:
            self._leave_line(request)
        request.level = level
        if is_lined_up:
            self._add_to_line(request)
            request.is_lined_up = True
        for seq in request.running:
            seq.is_returning = False  # entries of the old level are outdated
        for seq in request.waiting:
            seq.is_returning = False
            if not (seq.is_new or request.is_parked or request.is_paused):
                self._return(seq)
        if len(self._returning) > 2 * self.num_seqs + 64:
            self._compact()

    def change_levels(self, levels: Mapping[Request, Key]) -> None:
        """Give all live requests new levels; those that end up on the same level keep their order. O(live)."""
        in_line = [request for level in self._level_ids for request in self._levels[level].requests()]
        self._levels.clear()
        self._level_ids.clear()
        for request, level in levels.items():
            request.level = level
        for request in in_line:
            self._add_to_line(request)
        self._returning = [(seq.request.level, turn, seq) for _, turn, seq in self._returning]
        heapify(self._returning)

    def note_new_order(self) -> None:
        """Levels have changed, so that others than before may yield to the head."""
        self.num_changes += 1

    @property
    def first_level(self) -> Key | None:
        """The lowest level with a new sequence."""
        return self._level_ids[0] if self._level_ids else None

    @property
    def num_paused_requests(self) -> int:
        return len(self._paused)

    def tenants(self) -> tuple[WaitingTenant, ...]:
        """Return the counts of each tenant that has sequences waiting."""
        return tuple(self._counts.tenants())

    def turns_before(self, tenant: str) -> int:
        """Return how many sequences get a row before the first one of a new group of `tenant` does."""
        return self._counts.turns_before(tenant)

    def has_tenant(self, tenant: str) -> bool:
        """Return whether a tenant has sequences waiting."""
        return tenant in self._counts

    def has_group(self, tenant: str, group: str) -> bool:
        """Return whether a group has sequences waiting."""
        return (tenant, group) in self._groups

    def requests(self) -> Iterator[Request]:
        """Yield every request with a waiting sequence, in no particular order; for resets and checks."""
        found: dict[Request, None] = {}
        for lines in self._levels.values():
            found.update(dict.fromkeys(lines.requests()))
        found.update((entry[2].request, None) for entry in self._returning if _is_due(entry))
        found.update(self._parked)
        found.update(dict.fromkeys(self._held))
        found.update(self._paused)
        return iter(found)

    def lines(self) -> Iterator[tuple[Key, Request]]:
        """Yield the requests in line with new sequences, each with its level; for checks."""
        return ((level, request) for level, lines in self._levels.items() for request in lines.requests())

    def first(self, limit: int) -> list[Sequence]:
        """Return the first waiting sequences in order, then parked ones. O(waiting): only for the step trace."""
        return list(islice(self._in_order(), limit))

    def _in_order(self) -> Iterator[Sequence]:
        returning = sorted(entry for entry in self._returning if _is_due(entry))
        for level in sorted({*self._level_ids, *(entry[0] for entry in returning)}):
            yield from (seq for of_level, _, seq in returning if of_level == level)
            if level in self._levels:
                yield from self._levels[level].in_order()
        for request in (*self._parked, *self._held):
            yield from request.waiting

    @property
    def num_entries(self) -> int:
        """Size of the heap, outdated entries included; for checks."""
        return len(self._returning)

    def _set_aside(self, request: Request) -> None:
        if request.is_lined_up:
            self._leave_line(request)
        request.is_parked = True

    def _leave_side(self, request: Request) -> None:
        request.is_parked = False
        del (self._held if request in self._held else self._parked)[request]

    def _give_turn(self, seq: Sequence) -> None:
        seq.turn = self._num_turns
        self._num_turns += 1

    def _count_all(self, request: Request) -> None:
        for seq in request.waiting:
            self._count(seq, 1)

    def _count(self, seq: Sequence, change: int) -> None:
        self.num_seqs += change
        self.num_tokens += change * len(seq.token_ids)
        if seq.request.gives_way:
            return  # no other request waits for its turn
        name = (seq.request.tenant, seq.request.group)
        had = self._groups.get(name, 0)
        if had + change:
            self._groups[name] = had + change
        else:
            del self._groups[name]
        self._counts.add(name[0], change, bool(had + change) - bool(had))

    def _line_up(self, request: Request) -> None:
        has_new = False
        for seq in request.waiting:
            if seq.is_new:
                has_new = True
            else:
                self._return(seq)
        if has_new:
            self._add_to_line(request)
            self.num_changes += 1
            request.is_lined_up = True

    def _add_to_line(self, request: Request) -> None:
        level = request.level
        if level not in self._levels:
            self._levels[level] = _Lines(self.order)
            insort(self._level_ids, level)
        self._levels[level].add(request)

    def _leave_line(self, request: Request) -> None:
        request.is_lined_up = False
        level = request.level
        lines = self._levels[level]
        lines.remove(request)
        if not lines:
            del self._levels[level]
            del self._level_ids[bisect_left(self._level_ids, level)]

    def _return(self, seq: Sequence) -> None:
        if not seq.is_returning:
            seq.is_returning = True
            heappush(self._returning, (seq.request.level, seq.turn, seq))

    def _compact(self) -> None:
        due = [entry for entry in self._returning if _is_due(entry)]
        for entry in self._returning:
            if not _is_due(entry):
                _drop(entry)
        heapify(due)
        self._returning = due


def _is_due(entry: tuple[Key, int, Sequence]) -> bool:
    """Whether an entry is still valid: its sequence waits there."""
    level, turn, seq = entry
    request = seq.request
    return (
        seq.turn == turn
        and request.level == level
        and seq.is_waiting
        and not request.is_parked
        and not request.is_paused
    )


def _forget_turn(seq: Sequence) -> None:
    seq.turn = -1
    seq.is_returning = False  # an entry with its old turn is outdated


def _drop(entry: tuple[Key, int, Sequence]) -> None:
    level, turn, seq = entry
    if seq.turn == turn and seq.request.level == level:
        seq.is_returning = False
