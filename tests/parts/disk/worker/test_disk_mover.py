"""The threads that move pages: answers, order, and a scheduler that starts afresh while they work."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.device import Mark
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.parts.disk.messages import DiskContents, DropStoredKV, KVLoaded, KVStored, LoadKV, StoreKV
from penstock.parts.disk.worker.identity import Identity
from penstock.parts.disk.worker.mover import Answer, DiskMover
from penstock.parts.disk.worker.store import DiskStore, open_store

PAGE_BYTES = 5000
IDENTITY = Identity("model", "weights", "float32", "torch", "layout", PAGE_BYTES)


class Host:
    """Host pages, without a worker."""

    def __init__(self) -> None:
        self.num_pages = 8
        self.pages = np.zeros((8, PAGE_BYTES), dtype=np.uint8)
        self._device = CpuDevice(1)

    def mark(self) -> Mark:
        return self._device.mark()

    def read_page(self, page: int, into: memoryview) -> None:
        into[:] = self.pages[page].data

    def write_page(self, page: int, data: memoryview) -> None:
        self.pages[page] = np.frombuffer(data, dtype=np.uint8)


class SlowStore:
    """A store whose reads and writes wait until they may go on."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self.may_go = threading.Event()
        self.has_begun = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read(self, place: int, key: bytes, page: memoryview, stamp: int) -> None:
        self.has_begun.set()
        assert self.may_go.wait(60)
        self._store.read(place, key, page, stamp)

    def write(self, place: int, key: bytes, page: memoryview, stamp: int) -> None:
        self.has_begun.set()
        assert self.may_go.wait(60)
        self._store.write(place, key, page, stamp)


def opened(root: Path) -> DiskStore:
    store = open_store(root, IDENTITY, 1 << 20)
    assert store is not None
    return store


def answers(mover: DiskMover, count: int) -> list[Answer]:
    found: list[Answer] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += mover.take_done()
        time.sleep(0.001)
    return found


def order(kind: type[StoreKV | LoadKV], move_id: int, *moves: tuple[bytes, int, int]) -> StoreKV | LoadKV:
    """`moves`: key, host page and place."""
    keys, pages, places = zip(*moves, strict=True)
    return kind(move_id, b"".join(keys), pack_int32(pages), pack_int32(places))


def key(number: int) -> bytes:
    return bytes([number]) * 16


def test_there_and_back(tmp_path: Path) -> None:
    store, host = opened(tmp_path), Host()
    mover = DiskMover(store, host)
    mover.begin()
    assert answers(mover, 1) == [DiskContents(b"", b"", is_last=True)]
    assert not mover.is_busy
    for page in range(3):
        host.pages[page] = page + 1
    mover.order(order(StoreKV, 1, (key(1), 0, 10), (key(2), 1, 11), (key(3), 2, 12)))
    assert mover.is_busy
    (stored,) = answers(mover, 1)
    assert isinstance(stored, KVStored)
    assert (stored.move_id, stored.ok, stored.error) == (1, b"\1\1\1", "")
    mover.order(order(LoadKV, 2, (key(3), 5, 12), (key(9), 6, 11), (key(1), 7, 10)))
    (loaded,) = answers(mover, 1)
    assert isinstance(loaded, KVLoaded)
    assert (loaded.move_id, loaded.ok) == (2, b"\1\0\1")
    assert "no longer holds" in loaded.error
    assert [page[0] for page in host.pages[5:8]] == [3, 0, 1]
    mover.begin()
    (contents,) = answers(mover, 1)
    assert isinstance(contents, DiskContents)
    assert unpack_int32(contents.places).tolist() == [11, 12, 10], "the latest use comes last"
    assert contents.keys == key(2) + key(3) + key(1)
    mover.order(DropStoredKV())
    mover.begin()
    (contents,) = answers(mover, 1)
    assert isinstance(contents, DiskContents)
    with pytest.raises(ValueError, match="outside"):
        mover.order(order(LoadKV, 3, (key(1), 8, 0)))


def test_a_new_scheduler_does_not_meet_old_moves(tmp_path: Path) -> None:
    """A read that was begun before never writes to a host page that belongs to others by now."""
    store, host = opened(tmp_path), Host()
    page = memoryview(bytes([7]) * PAGE_BYTES)
    store.write(0, key(1), page, 1)
    slow = SlowStore(store)
    mover = DiskMover(slow, host)  # type: ignore[arg-type]
    mover.begin()
    answers(mover, 1)
    mover.order(order(LoadKV, 1, (key(1), 4, 0)))
    assert slow.has_begun.wait(60)
    mover.begin()
    host.pages[4] = 9
    mover.order(order(StoreKV, 2, (key(5), 4, 5)))
    slow.may_go.set()
    contents, stored = answers(mover, 2)
    assert isinstance(contents, DiskContents)
    assert isinstance(stored, KVStored)
    assert stored.move_id == 2
    assert (host.pages[4] == 9).all()
    assert not mover.is_busy
    found = memoryview(bytearray(PAGE_BYTES))
    store.read(5, key(5), found, 9)
    assert found == bytes([9]) * PAGE_BYTES


def test_a_read_does_not_wait_for_writes(tmp_path: Path) -> None:
    store, host = opened(tmp_path), Host()
    store.write(0, key(1), memoryview(bytes([7]) * PAGE_BYTES), 1)

    class SlowWrites(SlowStore):
        def read(self, place: int, key: bytes, page: memoryview, stamp: int) -> None:
            self._store.read(place, key, page, stamp)

    slow = SlowWrites(store)
    mover = DiskMover(slow, host)  # type: ignore[arg-type]
    mover.begin()
    answers(mover, 1)
    mover.order(order(StoreKV, 1, (key(5), 1, 5)))
    assert slow.has_begun.wait(60)
    mover.order(order(LoadKV, 2, (key(1), 4, 0)))
    (loaded,) = answers(mover, 1)
    assert isinstance(loaded, KVLoaded)
    slow.may_go.set()
    (stored,) = answers(mover, 1)
    assert isinstance(stored, KVStored)
    assert host.pages[4][0] == 7


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    store, host = opened(tmp_path), Host()

    class Full(SlowStore):
        def write(self, place: int, key: bytes, page: memoryview, stamp: int) -> None:
            raise OSError(28, "No space left on device")

    mover = DiskMover(Full(store), host)  # type: ignore[arg-type]
    mover.begin()
    answers(mover, 1)
    mover.order(order(StoreKV, 1, (key(5), 1, 5)))
    (stored,) = answers(mover, 1)
    assert isinstance(stored, KVStored)
    assert stored.ok == b"\0"
    assert "No space left" in stored.error
