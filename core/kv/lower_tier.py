"""What the page bookkeeping asks of a tier below the device, which a part may bring: its pages are on the host.

Pages that the prefix cache gives up go there, and are found again by their content; so do those of preempted sequences.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.core.kv.holder import Holder
from penstock.core.kv.host_tier import HostTier
from penstock.core.kv.page_pool import CacheNode, PrefixCache, PrefixHit


class Swapped(NamedTuple):
    """The host pages of a preempted sequence."""

    num_tokens: int  # settled tokens
    page_ids: list[int]  # host pages with all these positions
    window_page_ids: tuple[list[int], ...]  # for each further group, those that position `num_tokens` sees

    @property
    def all_pages(self) -> list[int]:
        """The pages of all groups, the last ones first."""
        return [*(page for pages in self.window_page_ids for page in pages), *reversed(self.page_ids)]


class LowerTier(Protocol):
    """One worker's host tier, and the preempted sequences that it holds."""

    @property
    def host(self) -> HostTier:
        """Its pages."""

    @property
    def swapped(self) -> Mapping[Holder, Swapped]:
        """Preempted sequences."""

    # --- evicted ----------------------------------------------------------------------------

    def demote(self, node: CacheNode) -> None:
        """The prefix cache gives up this node, which still has its page and its parents."""

    def demote_window_page(self, group: int, node: CacheNode, index: int, page_id: int) -> None:
        """A further page group (1, 2, ...) gives up a page of this node."""

    def drop_cached(self, *, is_dropping: bool) -> None:
        """Drop what is cached here, and stop demoting evicted pages until called with `is_dropping=False`."""

    # --- found ------------------------------------------------------------------------------

    def continued(self, seq: Holder, hit: PrefixHit, max_pages: int) -> PrefixHit:
        """Return a hit extended by the host pages of the first group that follow the device's pages."""

    def window_page(self, group: int, nodes: Sequence[CacheNode], hit: PrefixHit, index: int) -> int:
        """Return the `host_ref` of page `index` of a further group, or MISSING.

        `nodes`: the path to the hit's node; the hit's host pages follow it.
        """

    def hold(self, hit: PrefixHit) -> None:
        """Keep a hit's host pages until `let_go`."""

    def let_go(self, hit: PrefixHit) -> None:
        """Undo `hold`."""

    def promote(self, seq: Holder, hit: PrefixHit, window_places: Iterable[tuple[int, int]]) -> int:
        """Copy a hit's held host pages into pages of a sequence that enters a row, and let them go.

        Args:
            seq: has its first group's pages.
            hit: where it starts.
            window_places: (host page, device page to copy it to) of all further groups.

        Returns:
            The number of pages.
        """

    # --- preempted --------------------------------------------------------------------------

    def returning(self, seq: Holder, cache: PrefixCache | None) -> tuple[int, PrefixHit] | None:
        """Return where a swapped sequence continues, and its pages: those still in the prefix cache, then the host's.

        None if it is not swapped.
        """

    def forget(self, seq: Holder) -> None:
        """Let go of a sequence's host pages, if it is swapped: it has returned, or it ends."""
