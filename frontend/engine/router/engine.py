"""One engine as the router sees it: how much it has to do, and what is cached there.

The engine's own figures (`EngineStats`) are up to a fraction of a second old. What this frontend has sent is known at
once, so of the figures only what is beyond that counts, as others' work.
"""

from math import exp
from time import monotonic
from typing import NamedTuple

from penstock.core.config.options import SchedulerOptions
from penstock.frontend.engine.link import EngineLink, QueueGate
from penstock.frontend.engine.router.cached_pages import CachedPages, Found
from penstock.frontend.engine.router.prompt import Prompt
from penstock.frontend.errors import Overloaded
from penstock.ipc.messages import AddRequest, EngineStats, ListCache

SEQUENCE_TOKENS = 32
"""What each sequence there costs a new one, in tokens of prompts: they share steps until it ends."""

NO_ROW_TOKENS = 256
"""What each sequence costs in addition that has no row: it waits until another one has ended."""

CONTEXT_SHARE = 0.125
"""The same for each position in the contexts of running sequences: attention reads it in every step."""

HOST_WORTH = 0.75
"""What a page of the host saves, of what one of the device saves: it has to be copied, and may be gone by then."""


RECENT_SECONDS, RECENT_TOKENS = 10.0, 2048
"""How long it counts what an engine has computed; and what counts for all in addition, so that little says nothing."""


class Sent(NamedTuple):
    """What a request that was sent there adds, until its first token and until its end."""

    num_due: int  # tokens that it is expected to compute
    num_tokens: int  # that it has
    num_sequences: int


class Engine:
    """Its link, its load, its cache."""

    def __init__(self, link: EngineLink, label: str, limits: SchedulerOptions) -> None:
        """`limits` bound its queue until it reports its own."""
        self.link = link
        self._gate = QueueGate(limits, lambda: (link,))
        self.label = label
        self.cached = CachedPages(lambda: link.send(ListCache()))
        self._recent = 0.0  # tokens that the engine has computed, the older the less
        self._recent_of: EngineStats | None = None  # up to here
        self._recent_at = 0.0
        self._num_due = 0  # of this frontend's requests without a first token, as in `Sent`; likewise the next two
        self._num_tokens = 0
        self._num_sequences = 0
        self._num_context = 0

    def has_room(self, request: AddRequest) -> bool:
        """Return whether its queue has room for a request, as far as is known."""
        try:
            self._gate.check(request.n, request.n * len(request.prompt_token_ids) // 4, request.tenant)
        except Overloaded:
            return False
        return True

    def find(self, prompt: Prompt) -> Found:
        """Return how much of a prompt's start is cached there, or is about to be."""
        return self.cached.find(prompt.keys(self.cached))

    def num_saved(self, found: Found) -> float:
        """Return how many tokens need not be computed, those that have to be copied for a part."""
        return self.cached.page_size * (found.num_device + HOST_WORTH * found.num_host)

    def load(self) -> float:
        """Return how much work comes before a new request's, and beside it, in tokens of prompts."""
        others, num_sequences, num_context = 0, self._num_sequences, self._num_context
        num_without_row = 0
        if (stats := self.link.stats) is not None:
            others = max(0, stats.num_waiting_tokens + stats.num_prefill_tokens - self._num_tokens)
            num_sequences = max(num_sequences, stats.num_waiting + stats.num_running)
            num_context = max(num_context, stats.num_page_slots)
            num_without_row = max(0, num_sequences - stats.num_rows)
        beside = SEQUENCE_TOKENS * num_sequences + CONTEXT_SHARE * num_context
        return self._num_due + others + beside + NO_ROW_TOKENS * num_without_row

    def recent(self) -> float:
        """Return how many tokens the engine has computed recently, of prompts and of answers."""
        stats, last = self.link.stats, self._recent_of
        if stats is not None and stats is not last:
            now = monotonic()
            if last is not None:
                num_new = max(0, _num_computed(stats) - _num_computed(last))  # a new scheduler begins at zero
                self._recent = self._recent * exp((self._recent_at - now) / RECENT_SECONDS) + num_new
            self._recent_of, self._recent_at = stats, now
        return self._recent + RECENT_TOKENS

    def num_lacking(self, num_tokens: float) -> float:
        """Return how many tokens' pages must come free before so many can be computed."""
        stats = self.link.stats
        if stats is None or not self.cached.page_size or not stats.num_pages:
            return 0.0
        return max(0.0, num_tokens - (stats.num_pages - stats.num_used_pages) * self.cached.page_size)

    def begin(self, sent: Sent) -> None:
        """A request was sent there."""
        self._num_due += sent.num_due
        self._num_tokens += sent.num_tokens
        self._num_sequences += sent.num_sequences
        self._num_context += sent.num_sequences * sent.num_tokens

    def prefilled(self, sent: Sent) -> None:
        """It has its first token."""
        self._num_due -= sent.num_due
        self._num_tokens -= sent.num_tokens

    def end(self, sent: Sent) -> None:
        """It has ended, or is elsewhere; `prefilled` was called before."""
        self._num_sequences -= sent.num_sequences
        self._num_context -= sent.num_sequences * sent.num_tokens


def _num_computed(stats: EngineStats) -> int:
    return stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_output_tokens
