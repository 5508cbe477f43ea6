"""The host tier of a scheduler's worker: it joins the pages, swaps preempted sequences, and is counted."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import structlog

from penstock.core.kv.host_tier import HostTier
from penstock.core.scheduling.part import SchedulerPart
from penstock.core.sequences.sequence import Sequence
from penstock.ipc.messages import HostTierStats, StepResult
from penstock.parts.host.options import HostOptions
from penstock.parts.host.scheduler.swapping import Swapping
from penstock.parts.host.scheduler.tiers import Tiers, TierTotals

if TYPE_CHECKING:
    from penstock.core.scheduling.scheduler import Scheduler

log = structlog.get_logger()


class Host(SchedulerPart):
    """One worker's host tier."""

    stats_field = "host_tier"
    __slots__ = ("_page_bytes", "_swapping", "tiers", "totals")

    @classmethod
    def of(cls, scheduler: "Scheduler", before: Self | None) -> Self | None:
        if scheduler.limits.num_host_pages:
            return cls(scheduler, TierTotals() if before is None else before.totals)
        if scheduler.config.of(HostOptions).preemption == "swap":
            log.warning("swap disabled", reason="the worker has no host tier (--host-kv-gib)")
        return None

    def __init__(self, scheduler: "Scheduler", totals: TierTotals) -> None:
        kv, limits, pace = scheduler.kv, scheduler.limits, scheduler.pace
        pace.learn()  # what a page saves must be known
        self.totals = totals
        self.tiers = Tiers(HostTier(limits.num_host_pages), kv.copies, totals, kv.page_size, kv.windows)
        kv.use_tiers(self.tiers)
        self._page_bytes = limits.page_bytes
        self._swapping = Swapping(scheduler.config.of(HostOptions).preemption, self.tiers, limits, pace)

    def swaps_out(self, seq: Sequence) -> bool:
        return self._swapping.swap_out(seq)

    def copied(self, result: StepResult) -> None:
        self._swapping.note(result)

    def stats(self) -> HostTierStats:
        host, totals = self.tiers.host, self.totals
        return HostTierStats(
            num_free_pages=host.num_free,
            num_cached_pages=host.num_cached,
            num_held_pages=host.num_held,
            num_demoted_pages=totals.num_demoted_pages,
            num_lost_pages=totals.num_lost_pages,
            num_promoted_pages=totals.num_promoted_pages,
            num_swapped_out=totals.num_swapped_out,
            num_swapped_in=totals.num_swapped_in,
            num_bytes_to_host=totals.num_pages_to_host * self._page_bytes,
            num_bytes_from_host=totals.num_pages_from_host * self._page_bytes,
            num_copy_us=totals.num_copy_us,
        )

    def check(self, scheduler: "Scheduler") -> Iterator[tuple[bool, str]]:
        host, kv, swapped = self.tiers.host, scheduler.kv, self.tiers.swapped
        holders = Counter(page for each in swapped.values() for page in each.all_pages)
        for part in scheduler.parts.all:
            holders.update(part.held_host_pages())
        counts = [holders[page] for page in range(host.num_pages)]
        yield host.holder_counts() == counts, "every host page's holders"
        states = [*host.free_pages(), *host.cached_pages(), *holders]
        yield sorted(states) == list(range(host.num_pages)), "every host page is free, cached or held, once"
        yield host.num_held == len(holders), "the count of held host pages"
        named = host.keys()
        yield all(host.key_of(page) == key for key, page in named.items()), "a key and its page know each other"
        with_keys = [page for page in range(host.num_pages) if host.key_of(page)]
        yield sorted(named.values()) == with_keys, "each key finds one page"
        yield set(host.cached_pages()) <= set(with_keys), "cached host pages have keys"
        yield not set(host.free_pages()) & set(with_keys), "free host pages have none"
        waiting = {seq for request in scheduler.waiting.requests() for seq in request.waiting}
        yield set(swapped) <= waiting, "what is swapped out waits"
        for seq in waiting & set(swapped):
            name, (num_tokens, page_ids, window_page_ids) = f"{seq.request_id}/{seq.sequence_idx}", swapped[seq]
            yield 0 < num_tokens < seq.num_tokens, f"{name}: only known tokens are swapped"
            yield len(page_ids) == kv.pages_for(num_tokens), f"{name}: its pages on the host"
            for group, pages in zip(kv.windows, window_page_ids, strict=True):
                needed = range(group.first_needed(num_tokens), -(-num_tokens // group.page_size))
                yield len(pages) == len(needed), f"{name}: its windows on the host"
