"""Moves pages between the host tier and the disk, in threads of its own: the worker's loop never waits for the disk.

    StoreKV ──▶ writer ──▶ KVStored         one page at a time, at a low priority
    LoadKV  ──▶ reader ──▶ KVLoaded         several at a time

The threads touch a host page only to copy it to or from memory of their own, under a lock. When the scheduler starts
afresh, it gives the pages to other sequences. Then work that was begun before can no longer write to these pages, or
read their new content.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import structlog

from penstock.gpu_worker.devices.device import Mark
from penstock.gpu_worker.part import WorkerPart
from penstock.ipc import faults
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.parts.disk.messages import DiskContents, DropStoredKV, KVLoaded, KVStored, LoadKV, StoreKV
from penstock.parts.disk.worker.segment import KEY_BYTES, DamagedError
from penstock.parts.disk.worker.store import DiskStore

log = structlog.get_logger()

_PRIORITY = 10  # of the writer, as `nice`: steps come first
_MAX_READERS = 4
_PAGES_PER_MESSAGE = 1 << 14

Answer = KVStored | KVLoaded | DiskContents


class HostPages(Protocol):
    """The host tier's memory."""

    num_pages: int

    def mark(self) -> Mark:
        """Mark the end of all copies from and to host pages that were launched so far."""

    def read_page(self, page: int, into: memoryview) -> None:
        """Copy a page's bytes."""

    def write_page(self, page: int, data: memoryview) -> None:
        """Overwrite a page with these bytes."""


class _Move(NamedTuple):
    key: bytes
    host_page: int
    place: int
    stamp: int


class _Job:
    def __init__(self, epoch: int, message: StoreKV | LoadKV, moves: list[_Move], copied: Mark) -> None:
        self.epoch = epoch
        self.move_id = message.move_id
        self.moves = moves
        self.copied = copied  # the pages may not be touched before this mark is passed
        self.is_load = isinstance(message, LoadKV)
        self.began = 0.0


class DiskMover(WorkerPart):
    """All methods except those of the threads run in the worker's main thread, and none of them waits for the disk."""

    orders = (StoreKV, LoadKV, DropStoredKV)

    def __init__(self, store: DiskStore, host: HostPages) -> None:
        self._store = store
        self._host = host
        self._lock = threading.Lock()  # guards the epoch, and each copy to or from a host page
        self._epoch = 0
        self._loads: deque[_Job] = deque()
        self._writes: deque[_Job | DropStoredKV | None] = deque()  # None: list what the disk holds
        self._news = threading.Condition()
        self._done: deque[tuple[int, Answer]] = deque()
        self._num_due = 0  # answers that are still to come
        self._local = threading.local()
        self._before_write = faults.point("worker.disk")
        num_readers = max(1, min(_MAX_READERS, len(os.sched_getaffinity(0))))
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="disk-page")
        self._is_closed = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("disk-reader", self._read), ("disk-writer", self._write))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_places(self) -> int:
        """How many pages fit on the disk."""
        return self._store.num_pages

    @property
    def is_busy(self) -> bool:
        """Whether there are answers to take, now or soon."""
        return self._num_due > 0

    def begin(self) -> None:
        """The scheduler starts afresh: do nothing more for its earlier orders, and list what the disk holds.

        Host pages are not touched any more for earlier orders.
        """
        with self._news:
            with self._lock:
                self._epoch += 1
            self._loads.clear()
            self._writes.clear()
            self._writes.append(None)
            self._num_due = 1
            self._news.notify_all()

    def close(self) -> None:
        """Release the folder. Waits for pages that are being read or written, but not for those that are to come."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()
        self._readers.shutdown()
        self._store.close()

    def order(self, message: StoreKV | LoadKV | DropStoredKV) -> None:
        """Begin what the scheduler has decided."""
        with self._news:
            if isinstance(message, DropStoredKV):
                self._writes.append(message)
            else:
                jobs = self._writes if isinstance(message, StoreKV) else self._loads
                jobs.append(_Job(self._epoch, message, self._moves_of(message), self._host.mark()))
                self._num_due += 1
            self._news.notify_all()

    def take_done(self) -> list[Answer]:
        """Return the answers that have become ready."""
        answers: list[Answer] = []
        while self._done:
            epoch, answer = self._done.popleft()
            if epoch == self._epoch:
                answers.append(answer)
                self._num_due -= not (isinstance(answer, DiskContents) and not answer.is_last)
        return answers

    def _moves_of(self, message: StoreKV | LoadKV) -> list[_Move]:
        """The pages of a message; none if the message is invalid."""
        places, pages = unpack_int32(message.places), unpack_int32(message.host_pages)
        keys = [message.keys[i : i + KEY_BYTES] for i in range(0, len(message.keys), KEY_BYTES)]
        if not len(places) == len(pages) == len(keys) or len(message.keys) % KEY_BYTES:
            raise ValueError(f"{len(keys)} keys, {len(pages)} host pages and {len(places)} places")
        for numbers, end in ((places, self._store.num_pages), (pages, self._host.num_pages)):
            if numbers and not 0 <= min(numbers) <= max(numbers) < end:
                raise ValueError(f"a page outside 0 .. {end - 1}")
        return [_Move(*move) for move in zip(keys, pages, places, self._store.take_stamps(len(keys)), strict=True)]

    # --- in the threads -----------------------------------------------------------------------

    @property
    def _page(self) -> memoryview:
        """This thread's own buffer for a page."""
        if not hasattr(self._local, "page"):
            self._local.page = memoryview(bytearray(self._store.page_bytes))
        page: memoryview = self._local.page
        return page

    def _read(self) -> None:
        while True:
            with self._news:
                while not self._loads and not self._is_closed:
                    self._news.wait()
                if self._is_closed:
                    return
                job = self._loads.popleft()
            job.copied.wait()
            job.began = time.monotonic()
            self._answer(job, list(self._readers.map(partial(self._read_page, job), job.moves)))

    def _read_page(self, job: _Job, move: _Move) -> str:
        """Fill a host page; return what went wrong, or an empty string."""
        page = self._page
        try:
            self._store.read(move.place, move.key, page, move.stamp)
        except (DamagedError, OSError) as error:
            log.warning("disk KV: page lost", reason=str(error))
            return str(error)
        with self._lock:
            if job.epoch == self._epoch:
                self._host.write_page(move.host_page, page)
        return ""

    def _write(self) -> None:
        with suppress(OSError):  # not every system has priorities per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
        while True:
            with self._news:
                while not self._writes and not self._is_closed:
                    self._news.wait()
                if self._is_closed:
                    return
                job, epoch = self._writes.popleft(), self._epoch
            match job:
                case None:
                    self._tell_contents(epoch)
                case DropStoredKV():
                    self._store.drop_all()
                case _:
                    job.copied.wait()
                    job.began = time.monotonic()
                    self._answer(job, [self._write_page(job, move) for move in job.moves])

    def _write_page(self, job: _Job, move: _Move) -> str:
        """Write a host page; return what went wrong, or an empty string."""
        page = self._page
        with self._lock:
            if job.epoch != self._epoch or self._is_closed:
                return "given up"
            self._host.read_page(move.host_page, page)
        try:
            self._before_write()
            self._store.write(move.place, move.key, page, move.stamp)
        except OSError as error:
            return str(error)
        return ""

    def _answer(self, job: _Job, errors: Sequence[str]) -> None:
        """`errors`: what went wrong for each page; an empty string if nothing did."""
        num_us = int((time.monotonic() - job.began) * 1e6)
        error = next(filter(None, errors), "")[:200]
        kind = KVLoaded if job.is_load else KVStored
        self._done.append((job.epoch, kind(job.move_id, bytes(not each for each in errors), num_us, error)))

    def _tell_contents(self, epoch: int) -> None:
        held = self._store.held()
        for start in range(0, max(1, len(held)), _PAGES_PER_MESSAGE):
            part = held[start : start + _PAGES_PER_MESSAGE]
            is_last = start + _PAGES_PER_MESSAGE >= len(held)
            places, keys = pack_int32([each.place for each in part]), b"".join(each.key for each in part)
            unusable = pack_int32(self._store.unusable()) if is_last else b""
            self._done.append((epoch, DiskContents(places, keys, is_last, unusable)))
