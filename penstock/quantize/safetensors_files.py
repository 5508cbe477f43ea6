"""Writes safetensors files of tensors that are made one after the other, so only one is in memory at a time.

A file is 8 bytes with the header's length, the header (JSON: dtype, shape and place of each tensor), and the data
(https://github.com/huggingface/safetensors#format). The header comes first, so it must be known before any tensor is
made.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.models.files.folder import WEIGHT_INDEX

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
MOST_BYTES = 5 << 30
"""Most bytes of one file; a larger tensor has a file of its own."""
_ALIGNMENT = 8


class Entry(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * _BYTES[self.dtype]


class Job(NamedTuple):
    """Tensors that are made together."""

    entries: tuple[Entry, ...]
    make: Callable[[], Sequence[memoryview]]
    """Makes the tensors; returns the bytes of each."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.num_bytes for entry in self.entries)


def write(folder: Path, jobs: Sequence[Job], done: Callable[[Job], None], most_bytes: int = MOST_BYTES) -> None:
    """Make all tensors, and write them.

    Args:
        folder: where `model.safetensors` goes, or numbered files with their index.
        jobs: in the order in which they are done.
        done: called with each finished job.
        most_bytes: most bytes of one file.

    Raises:
        OSError: for example if the disk is full.
    """
    files = list(_files(jobs, most_bytes))
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
        weight_map = {
            entry.name: name for name, its in zip(names, files, strict=True) for job in its for entry in job.entries
        }
        index = {"metadata": {"total_size": sum(job.num_bytes for job in jobs)}, "weight_map": weight_map}
        (folder / WEIGHT_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for name, its in zip(names, files, strict=True):
        _write_file(folder / name, its, done)


def _files(jobs: Sequence[Job], most_bytes: int) -> Iterator[list[Job]]:
    """The jobs whose tensors go into each file."""
    its: list[Job] = []
    size = 0
    for job in jobs:
        if its and size + job.num_bytes > most_bytes:
            yield its
            its, size = [], 0
        its.append(job)
        size += job.num_bytes
    yield its


def _write_file(path: Path, jobs: Sequence[Job], done: Callable[[Job], None]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in (entry for job in jobs for entry in job.entries):
        begin, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for job in jobs:
            for entry, data in zip(job.entries, job.make(), strict=True):
                if data.nbytes != entry.num_bytes:
                    raise ValueError(f"{entry.name} has {data.nbytes} bytes, and should have {entry.num_bytes}")
                file.write(data)
            done(job)
