"""The prefill engine's side of a handover: computes prompts for other engines, and keeps their pages until read.

    AddRequest with `handover_from` ──▶ an ordinary request with one token of output, which is not used
    each plan with a chunk of it    ──▶ OfferKV before the plan: the pages that this chunk completes, and at first those
                                        that the prefix cache had; the worker tells the reader, layer by layer
    it ends                         ──▶ its pages stay with `Kept` instead of being released
    HandoverTaken                   ──▶ they are released; the answer says whether they were kept until then

If the sequence loses its row before the end, offered pages are reused. The handover has then failed, and the other
engine computes the prompt. Nothing is announced twice, and a late reader never takes wrong data.
"""

from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from penstock.core.kv.kv_pages import KVPages
from penstock.core.kv.page_pool import CacheNode
from penstock.core.kv.window_pages import WindowTable
from penstock.core.sequences.sequence import Owner, Request, Sequence
from penstock.core.steps.plan_builder import Chunk
from penstock.ipc.codec import pack_int32
from penstock.parts.handover.messages import OfferKV, WithdrawKV
from penstock.parts.handover.scheduler.arrivals import HandoverTotals

LOST = "the prefill engine could not keep the pages of this prompt"


class Departure:
    """A prompt that is computed for another engine. Its sequence holds the pages first; then they are kept here."""

    __slots__ = (
        "cache_node",
        "next_indices",
        "num_pages",
        "num_tokens",
        "owner",
        "page_ids",
        "request",
        "window_tables",
    )

    def __init__(self, request: Request, num_there: int, kv: KVPages) -> None:
        self.request: Request | None = request  # None: it has ended, and pages are kept
        self.owner = request.owner
        self.num_tokens = request.num_prompt_tokens
        self.num_pages = 0  # offered
        # By page group: the next page to offer. Pages that the last position's window does not reach are not needed.
        self.next_indices = [num_there // kv.page_size] + [
            max(group.first_needed(self.num_tokens), num_there // group.page_size) for group in kv.windows
        ]
        self.page_ids: list[int] = []
        self.window_tables: list[WindowTable] = []
        self.cache_node: CacheNode | None = None


class Departures:
    """The pages that one worker's pool has for other engines."""

    __slots__ = ("_broken", "_departures", "_kv", "_messages", "_totals")

    def __init__(self, kv: KVPages, totals: HandoverTotals) -> None:
        self._kv = kv
        self._totals = totals
        self._departures: dict[str, Departure] = {}
        self._broken: list[Request] = []
        self._messages: list[OfferKV | WithdrawKV] = []

    def has(self, request_id: str) -> bool:
        """Whether there is a handover of this name, even if its request has ended."""
        return request_id in self._departures

    def begin(self, request: Request, num_there: int) -> None:
        """A request for a handover was accepted; the other engine has its first `num_there` tokens."""
        self._departures[request.request_id] = Departure(request, num_there, self._kv)

    def offer(self, chunks: Iterable[Chunk], step_id: int) -> None:
        """These chunks are in the next plan: offer the pages that they complete."""
        for chunk in chunks:
            departure = self._departures.get(chunk.seq.request_id)
            if departure is None:
                continue
            seq, end = chunk.seq, chunk.start + chunk.num_new
            pages: list[tuple[int, int, int]] = []
            first = departure.next_indices
            for index in range(first[0], end // self._kv.page_size):
                pages.append((0, index, seq.page_ids[index]))
            first[0] = max(first[0], end // self._kv.page_size)
            for number, (group, table) in enumerate(zip(self._kv.windows, seq.window_tables, strict=True), 1):
                last = end // group.page_size
                pages += [(number, i, table.page_ids[i - table.first]) for i in range(first[number], last)]
                first[number] = max(first[number], last)
            if pages:
                departure.num_pages += len(pages)
                columns = pack_int32(number for page in pages for number in page)
                self._messages.append(OfferKV(chunk.seq.request_id, step_id, columns))

    def keeps(self, seq: Sequence) -> bool:
        """A sequence is about to lose its row. Returns whether its pages are kept here: they must not be released."""
        departure = self._departures.get(seq.request_id)
        if departure is None:
            return False
        if seq.num_settled_tokens < departure.num_tokens:  # preempted, or aborted
            self._broken.append(seq.request)
            self._forget(seq.request_id)
            return False
        departure.request = None
        departure.page_ids, departure.window_tables = seq.page_ids, seq.window_tables
        departure.cache_node = seq.cache_node
        return True

    def taken(self, request_id: str, owner: Owner) -> bool:
        """The other engine has read all pages. Returns whether they were kept until now."""
        departure = self._departures.get(request_id)
        if departure is None or departure.request is not None or departure.owner != owner:
            return False
        self._totals.num_sent += 1
        self._totals.num_sent_pages += departure.num_pages
        self._forget(request_id)
        return True

    def leave(self, request_id: str, owner: Owner) -> bool:
        """The other engine no longer wants a handover. Returns whether there was one."""
        departure = self._departures.get(request_id)
        if departure is None or departure.owner != owner:
            return False
        self._forget(request_id)
        return True

    def ended(self, request: Request) -> None:
        """A request has ended; if its pages are kept, they stay."""
        departure = self._departures.get(request.request_id)
        if departure is not None and departure.request is not None:
            self._forget(request.request_id)

    def leave_owner(self, owner: Owner) -> None:
        """An engine is gone."""
        for request_id in [name for name, each in self._departures.items() if each.owner == owner]:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        departure = self._departures.pop(request_id)
        self._messages.append(WithdrawKV(request_id))  # a reader may wait for it even if nothing was offered yet
        if departure.request is None:
            self._kv.release(departure)

    def take_broken(self) -> list[Request]:
        """Return the requests whose pages could not be kept; these requests must end."""
        broken, self._broken = self._broken, []
        return [request for request in broken if request.is_live]

    def unfinished(self) -> list[Request]:
        """Return the requests that have not ended."""
        return [each.request for each in self._departures.values() if each.request is not None]

    def take_messages(self) -> list[OfferKV | WithdrawKV]:
        """Return the messages for the worker, to be sent before the plan that was made last."""
        messages, self._messages = self._messages, []
        return messages

    @property
    def num_kept_pages(self) -> int:
        """Pages that wait for their readers."""
        return sum(
            len(each.page_ids) + sum(len(table.page_ids) for table in each.window_tables) for each in self.holders()
        )

    def holders(self) -> ListOf[Departure]:
        """Return the departures that hold pages; for checks."""
        return [each for each in self._departures.values() if each.request is None]
