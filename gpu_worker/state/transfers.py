"""Copies of pages between device and host: direct on a CPU, beside the steps on a device with memory of its own.

A device has two lanes of work, each in order: one for steps, one for copies. Slots of device memory connect them:

    to the host     steps    gather pages into a slot ─┐
                    copies                             └▶ slot to host pages
    from the host   copies   host pages into a slot ─┐
                    steps                            └▶ scatter the slot into pages

So the lane of steps waits for the bus only where it needs what comes over the bus, and a page may be written to as soon
as it was gathered. Copies from the host begin while the step before still runs. Only the lane of steps touches device
pages, and only the lane of copies touches host pages, both in the order of the plans. A slot is reused when the lane
that used it last has passed that point.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.gpu_worker.devices.device import Array, Lane, Mark

Pages = npt.NDArray[np.int32]

_NUM_SLOTS = 2
_SLOT_BYTES = 32 << 20


class Transfers(Protocol):
    """Copies between a device's blocks [parts, pages, elements] and a host's pages [pages, parts, elements]."""

    def to_host(self, src: Pages, dst: Pages) -> None:
        """Begin to copy pages of the device to pages of the host, which are all different."""

    def from_host(self, src: Pages, dst: Pages) -> None:
        """Begin to copy pages of the host to pages of the device, which are all different."""

    def mark(self) -> Mark:
        """Mark the end of the copies that were begun so far."""

    def take_times(self) -> tuple[int, int]:
        """Return how many pages' copies have ended since the last call, and the microseconds that these took."""


class DirectTransfers:
    """Memory to memory, at once."""

    def __init__(self, blocks: Tensor, host: Tensor) -> None:
        self._blocks = blocks
        self._host = host
        self._num_pages = 0
        self._seconds = 0.0

    def to_host(self, src: Pages, dst: Pages) -> None:
        began = time.monotonic()
        for page_id, page in zip(src.tolist(), dst.tolist(), strict=True):
            self._host[page].copy_(self._blocks[:, page_id])
        self._note(src, began)

    def from_host(self, src: Pages, dst: Pages) -> None:
        began = time.monotonic()
        for page, page_id in zip(src.tolist(), dst.tolist(), strict=True):
            self._blocks[:, page_id].copy_(self._host[page])
        self._note(src, began)

    def mark(self) -> Mark:
        return _Passed()

    def take_times(self) -> tuple[int, int]:
        taken = self._num_pages, int(self._seconds * 1e6)
        self._num_pages, self._seconds = 0, 0.0
        return taken

    def _note(self, pages: Pages, began: float) -> None:
        self._num_pages += len(pages)
        self._seconds += time.monotonic() - began


class _Passed:
    """The mark of work that is done as soon as it is launched."""

    def us_since(self, earlier: Mark) -> int:
        return 0

    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Timed(NamedTuple):
    began: Mark
    ended: Mark
    num_pages: int


class StagedTransfers:
    """Through slots, beside steps."""

    def __init__(
        self,
        blocks: Tensor,
        host: Tensor,
        steps: Lane,
        copies: Lane,
        upload: Callable[[Array], Tensor],
    ) -> None:
        """`upload` brings page numbers to the device, in the lane of steps."""
        num_parts, _, num_elements = blocks.shape
        size = max(1, _SLOT_BYTES // (num_parts * num_elements * blocks.element_size()))
        self._blocks = blocks
        self._host = host
        self._steps = steps
        self._copies = copies
        self._upload = upload
        self._slots = [blocks.new_zeros((size, num_parts, num_elements)) for _ in range(_NUM_SLOTS)]
        self._used = [steps.mark()] * _NUM_SLOTS  # the last use of each slot
        self._size = size
        self._next = 0
        self._timed: list[_Timed] = []

    def to_host(self, src: Pages, dst: Pages) -> None:
        for begin in range(0, len(src), self._size):
            end = begin + self._size
            number, slot = self._take_slot(self._steps)
            index = self._upload(src[begin:end].astype(np.int64))
            self._steps.run(partial(_gather, self._blocks, index, slot))
            self._copies.wait(self._steps.mark())
            began = self._copies.mark()
            pages = dst[begin:end].tolist()
            self._copies.run(partial(_copy_each, self._host, pages, slot))
            self._end(number, began, self._copies.mark(), len(pages))

    def from_host(self, src: Pages, dst: Pages) -> None:
        for begin in range(0, len(src), self._size):
            end = begin + self._size
            number, slot = self._take_slot(self._copies)
            began = self._copies.mark()
            pages = src[begin:end].tolist()
            self._copies.run(partial(_fetch_each, self._host, pages, slot))
            ended = self._copies.mark()
            self._steps.wait(ended)
            index = self._upload(dst[begin:end].astype(np.int64))
            self._steps.run(partial(_scatter, self._blocks, index, slot))
            self._end(number, began, ended, len(pages))
            self._used[number] = self._steps.mark()

    def mark(self) -> Mark:
        return self._copies.mark()

    def take_times(self) -> tuple[int, int]:
        num_pages = num_us = 0
        while self._timed and self._timed[0].ended.is_passed():
            timed = self._timed.pop(0)
            num_pages += timed.num_pages
            num_us += timed.ended.us_since(timed.began)
        return num_pages, num_us

    def _take_slot(self, lane: Lane) -> tuple[int, Tensor]:
        """The next slot, once its last user has passed."""
        number = self._next
        self._next = (number + 1) % _NUM_SLOTS
        lane.wait(self._used[number])
        return number, self._slots[number]

    def _end(self, number: int, began: Mark, ended: Mark, num_pages: int) -> None:
        self._used[number] = ended
        self._timed.append(_Timed(began, ended, num_pages))


def slots_bytes(page_bytes: int) -> int:
    """Return the device memory that transfers of such pages take at most: slots, and as much again for a gather."""
    return (_NUM_SLOTS + 1) * max(_SLOT_BYTES, page_bytes)


def _gather(blocks: Tensor, index: Tensor, slot: Tensor) -> None:
    slot[: index.shape[0]].copy_(blocks.index_select(1, index).transpose(0, 1))


def _scatter(blocks: Tensor, index: Tensor, slot: Tensor) -> None:
    blocks.index_copy_(1, index, slot[: index.shape[0]].transpose(0, 1))


def _copy_each(host: Tensor, pages: list[int], slot: Tensor) -> None:
    for i, page in enumerate(pages):
        host[page].copy_(slot[i], non_blocking=True)


def _fetch_each(host: Tensor, pages: list[int], slot: Tensor) -> None:
    for i, page in enumerate(pages):
        slot[i].copy_(host[page], non_blocking=True)
