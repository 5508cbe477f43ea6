"""One engine as the router sees it: how much work it has, and what it has cached.

The engine's own figures (`EngineStats`) are up to a fraction of a second old, but this frontend knows at once what it
has sent. So only the part of the figures beyond that is added, as the work of other frontends.
"""

from math import exp
from time import monotonic
from typing import NamedTuple

from penstock.config.options import SchedulerOptions
from penstock.frontend.engine.link import EngineLink, QueueGate
from penstock.frontend.engine.router.cached_pages import CachedPages, Found
from penstock.frontend.engine.router.prompt import Prompt
from penstock.frontend.errors import Overloaded
from penstock.ipc.messages import AddRequest, EngineStats, ListCache

SEQUENCE_TOKENS = 32
"""What each sequence at the engine costs a new one, in prompt tokens: they share steps until the older one ends."""

NO_ROW_TOKENS = 256
"""What a sequence without a row costs in addition: it waits until another one has ended."""

CONTEXT_SHARE = 0.125
"""What each position in the contexts of running sequences costs: attention reads it in every step."""

HOST_WORTH = 0.75
"""What a page on the host saves, compared to one on the device: it has to be copied, and may be gone by then."""


RECENT_SECONDS, RECENT_TOKENS = 10.0, 2048
"""How fast old work is forgotten; and tokens added for every engine, so that small differences do not matter."""


class Sent(NamedTuple):
    """What a request adds to an engine's load, until its first token and until its end."""

    num_due: int  # prompt tokens that the engine is expected to compute
    num_tokens: int  # tokens that the request has
    num_sequences: int


class Engine:
    """One engine's link, load and cache."""

    def __init__(self, link: EngineLink, label: str, limits: SchedulerOptions) -> None:
        """`limits` bound its queue until it reports its own."""
        self.link = link
        self._gate = QueueGate(limits, lambda: (link,))
        self.label = label
        self.cached = CachedPages(lambda: link.send(ListCache()))
        self._recent = 0.0  # tokens that the engine has computed; older ones count less
        self._recent_of: EngineStats | None = None  # the report up to which they were counted
        self._recent_at = 0.0
        self._num_due = 0  # of this frontend's requests without a first token, as in `Sent`; likewise the next two
        self._num_tokens = 0
        self._num_sequences = 0
        self._num_context = 0

    def has_room(self, request: AddRequest) -> bool:
        """Return whether the engine's queue has room for a request, as far as known."""
        try:
            self._gate.check(request.n, request.n * len(request.prompt_token_ids) // 4, request.tenant)
        except Overloaded:
            return False
        return True

    def find(self, prompt: Prompt) -> Found:
        """Return how much of a prompt's start is cached at the engine, or soon will be."""
        return self.cached.find(prompt.keys(self.cached))

    def num_saved(self, found: Found) -> float:
        """Return how many tokens need not be computed; those on the host count only in part."""
        return self.cached.page_size * (found.num_device + HOST_WORTH * found.num_host)

    def load(self) -> float:
        """Return how much work comes before a new request's and beside it, in prompt tokens."""
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
        """Return how many tokens, of prompts and answers, the engine has computed recently."""
        stats, last = self.link.stats, self._recent_of
        if stats is not None and stats is not last:
            now = monotonic()
            if last is not None:
                num_new = max(0, _num_computed(stats) - _num_computed(last))  # a new scheduler begins at zero
                self._recent = self._recent * exp((self._recent_at - now) / RECENT_SECONDS) + num_new
            self._recent_of, self._recent_at = stats, now
        return self._recent + RECENT_TOKENS

    def num_lacking(self, num_tokens: float) -> float:
        """Return for how many of these tokens pages must come free before they can be computed."""
        stats = self.link.stats
        if stats is None or not self.cached.page_size or not stats.num_pages:
            return 0.0
        return max(0.0, num_tokens - (stats.num_pages - stats.num_used_pages) * self.cached.page_size)

    def begin(self, sent: Sent) -> None:
        """A request was sent to the engine."""
        self._num_due += sent.num_due
        self._num_tokens += sent.num_tokens
        self._num_sequences += sent.num_sequences
        self._num_context += sent.num_sequences * sent.num_tokens

    def prefilled(self, sent: Sent) -> None:
        """The request has its first token."""
        self._num_due -= sent.num_due
        self._num_tokens -= sent.num_tokens

    def end(self, sent: Sent) -> None:
        """The request has ended or moved; `prefilled` was called before."""
        self._num_sequences -= sent.num_sequences
        self._num_context -= sent.num_sequences * sent.num_tokens


def _num_computed(stats: EngineStats) -> int:
    return stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_output_tokens
