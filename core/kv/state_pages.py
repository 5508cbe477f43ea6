"""Pages of a model in which some layers keep a state: a prefix can be reused only where it has a snapshot."""

from penstock.core.kv.holder import Holder, PageTables
from penstock.core.kv.kv_pages import KVPages
from penstock.core.kv.page_pool import PrefixHit
from penstock.core.kv.snapshots import Snapshots


class StatePages(KVPages):
    """Like `KVPages`, with a prefix cache whose hits end at snapshots."""

    __slots__ = ("_snapshots",)

    def __init__(self, num_pages: int, page_size: int, snapshots: Snapshots) -> None:
        super().__init__(num_pages, page_size, enable_prefix_caching=True)
        self.snapshots = self._snapshots = snapshots
        self.can_fork = False
        assert self.cache is not None
        self.cache.given_up = snapshots.forget

    def find_prefix(self, seq: Holder) -> PrefixHit:
        return self._snapshots.cut(super().find_prefix(seq))

    def settle(self, seq: Holder) -> None:
        super().settle(seq)
        self._snapshots.settled(seq)

    def release(self, seq: PageTables) -> None:
        self._snapshots.leave(seq)
        super().release(seq)
