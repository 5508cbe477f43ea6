"""A disk under a fake worker: it keeps pages while workers and schedulers come and go, and sometimes loses them."""

from array import array
from random import Random

from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.page_keys import KEY_BYTES
from penstock.parts.disk.messages import DiskContents, DropStoredKV, KVLoaded, KVStored, LoadKV, StoreKV
from tests.core.fake_worker import FakeWorker

Content = tuple["array[int]", dict[int, tuple[int, int]]]
Order = StoreKV | LoadKV | DropStoredKV


class FakeDisk:
    """Places by number, and what was ordered and not done."""

    def __init__(self, num_places: int, seed: int) -> None:
        self.num_places = num_places
        self.places: dict[int, tuple[bytes, Content]] = {}
        self.rng = Random(seed)
        self.loss_rate = self.rng.choice([0.0, 0.3])  # of pages read
        self.failure_rate = self.rng.choice([0.0, 0.0, 0.0, 0.05])  # of pages written
        self._orders: list[tuple[int, Order]] = []  # how many plans come before each
        self._news: list[DiskContents] = []
        self.num_stored = self.num_loaded = self.num_lost = self.num_failed = 0

    def begin(self) -> None:
        """A worker has come, or a scheduler: it is told what is there. What was being written may be there."""
        for _, order in self._orders:
            if isinstance(order, StoreKV):
                for place in unpack_int32(order.places):
                    if self.rng.random() < 0.5:
                        self.places.pop(place, None)  # half written
        self._orders.clear()
        held = list(self.places.items())
        parts = [held[i : i + 3] for i in range(0, len(held), 3)] or [[]]
        self._news = [
            DiskContents(
                pack_int32([place for place, _ in part]), b"".join(key for _, (key, _) in part), part is parts[-1]
            )
            for part in parts
        ]

    def take(self, orders: list[Order], num_plans: int) -> None:
        self._orders += [(num_plans, order) for order in orders]

    def can_answer(self, num_executed: int) -> bool:
        return bool(self._news) or any(after <= num_executed for after, _ in self._orders)

    def answer(self, worker: FakeWorker, num_executed: int) -> DiskContents | KVStored | KVLoaded | None:
        """Tell what is there, or carry out an order: those of each kind in order."""
        if self._news:
            return self._news.pop(0)
        due = [order for after, order in self._orders if after <= num_executed]
        reads = [order for order in due if isinstance(order, LoadKV)]
        writes = [order for order in due if not isinstance(order, LoadKV)]
        order = self.rng.choice([each[0] for each in (reads, writes) if each])
        self._orders = [each for each in self._orders if each[1] is not order]
        if isinstance(order, DropStoredKV):
            self.places.clear()
            return None
        keys = [order.keys[i : i + KEY_BYTES] for i in range(0, len(order.keys), KEY_BYTES)]
        moves = list(zip(keys, unpack_int32(order.host_pages), unpack_int32(order.places), strict=True))
        assert len({page for _, page, _ in moves}) == len({place for _, _, place in moves}) == len(moves) > 0
        assert all(0 <= place < self.num_places for _, _, place in moves)
        if isinstance(order, StoreKV):
            return KVStored(order.move_id, bytes(self._write(worker, *move) for move in moves), 10 * len(moves), "full")
        return KVLoaded(order.move_id, bytes(self._read(worker, *move) for move in moves), 10 * len(moves))

    def _write(self, worker: FakeWorker, key: bytes, page: int, place: int) -> bool:
        self.places.pop(place, None)
        if self.rng.random() < self.failure_rate:
            self.num_failed += 1
            return False
        self.num_stored += 1
        self.places[place] = key, worker.host_content(page)
        return True

    def _read(self, worker: FakeWorker, key: bytes, page: int, place: int) -> bool:
        held = self.places.get(place)
        if held is None or held[0] != key or self.rng.random() < self.loss_rate:
            self.places.pop(place, None)
            self.num_lost += 1
            return False
        self.places[place] = self.places.pop(place)  # used last
        worker.set_host_content(page, held[1])
        self.num_loaded += 1
        return True
