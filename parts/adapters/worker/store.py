"""Adapters that were read, in the host's memory, so that their turns on the device come without reading files."""

from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch

from penstock.gpu_worker.models.adapters import Adapters, Made
from penstock.parts.adapters.worker.files import Fitting, read_adapter

MAX_BYTES = 4 << 30
"""Limit over all that are kept; what slots use on a CPU is counted, too, because it is the same memory."""


class Kept(NamedTuple):
    """An adapter, arranged for the model's products."""

    made: Made
    rank: int  # the largest of its modules


class AdapterStore:
    """The most recently used adapters, by key. A thread reads, and another one may forget meanwhile."""

    def __init__(
        self, adapters: Adapters, fitting: Fitting, dtype: torch.dtype, *, max_num: int, max_bytes: int = MAX_BYTES
    ) -> None:
        """`dtype`: of the matrices."""
        self._adapters = adapters
        self._fitting = fitting
        self._dtype = dtype
        self._max_num, self._max_bytes = max_num, max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._reading = ""  # the key of what is being read, unless it was forgotten meanwhile
        self._lock = Lock()

    def find(self, key: str, path: Path) -> Kept:
        """The adapter of this key, which is read if it is not here.

        Raises:
            AdapterError: it cannot be used.
        """
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
            self._reading = key
        adapter = read_adapter(path, key, self._fitting, self._dtype)
        kept = Kept(self._adapters.made(adapter.factors), adapter.rank)
        with self._lock:
            if self._reading != key:
                return kept
            self._kept[key] = kept
            self._num_bytes += kept.made.num_bytes
            while len(self._kept) > self._max_num or self._num_bytes > self._max_bytes:
                _, gone = self._kept.popitem(last=False)
                self._num_bytes -= gone.made.num_bytes
        return kept

    def forget(self, key: str) -> None:
        """Free its memory."""
        with self._lock:
            if self._reading == key:
                self._reading = ""
            if (gone := self._kept.pop(key, None)) is not None:
                self._num_bytes -= gone.made.num_bytes
