"""Tensors of a checkpoint, or parts of them, with a count and a digest of the bytes that were read."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from penstock.gpu_worker.formats.part import decode_part
from penstock.gpu_worker.formats.registry import decode
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.check import ModelTensors
from penstock.models.files.source import LoadError, StoredTensor
from penstock.models.formats.format import Part, Shape
from penstock.models.weights.sources import WHOLE, Cut, Ranges

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # torch's own dtype of this name lacks most operations
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class BytesRead:
    """Counts the tensor bytes that were read, and digests them for a rank that reads only parts."""

    def __init__(self, *, with_digest: bool = False) -> None:
        """`with_digest`: whether `digest` is wanted later; it takes a second for each 1 to 7 GB."""
        self.total = 0
        self._digest = hashlib.blake2b(digest_size=8) if with_digest else None

    @property
    def digest(self) -> str:
        """16 hex digits, the same for the same parts read in the same order; empty without `with_digest`."""
        return "" if self._digest is None else self._digest.hexdigest()

    def note(self, read: Tensor) -> None:
        """Count these bytes."""
        self.total += read.numel() * read.element_size()
        if self._digest is not None:
            octets = read.contiguous().view(-1).view(torch.uint8).numpy()
            self._digest.update(f"{read.dtype} {list(read.shape)} {crc32(octets.data)} ".encode())


class StoredWeights:
    """The tensors of a model."""

    def __init__(
        self,
        tensors: ModelTensors,
        matrices: Mapping[str, Shape],
        on_read: Callable[[], None],
        bytes_read: BytesRead | None = None,
    ) -> None:
        """
        Args:
            tensors: the checkpoint's tensors, already checked.
            matrices: the shape of each matrix.
            on_read: called for each weight that is read.
            bytes_read: counts the bytes that are read.
        """
        self.stored, self._formats, _ = tensors
        self._matrices = matrices
        self._on_read = on_read
        self._bytes_read = BytesRead() if bytes_read is None else bytes_read

    def read(self, name: str, ranges: Sequence[Ranges | None] = ()) -> Tensor:
        """A tensor, or these ranges of each of its axes."""
        self._on_read()
        return self._read(self.stored[name], ranges)

    def read_quantized(self, name: str, cut: Cut = WHOLE) -> QuantizedWeight | None:
        """A quantized matrix, or part of it; None if it is not quantized.

        Raises:
            LoadError: the matrix is damaged, or cannot be cut like this.
        """
        if name not in self._formats:
            return None
        self._on_read()
        format, shape = self._formats[name], self._matrices[name]
        parts = {role: part for role, part in format.parts(name, shape).items() if part.name in self.stored}
        if cut == WHOLE:
            weight = decode(format, {role: self._read(self.stored[part.name]) for role, part in parts.items()})
        else:
            weight = decode_part(format, parts, shape, cut, lambda role, ranges: self._read_part(parts[role], ranges))
        wanted = tuple(
            size if its is None else sum(end - begin for begin, end in its)
            for size, its in zip(shape, (cut.items, cut.outputs, cut.inputs)[-len(shape) :], strict=True)
        )
        if weight.codes.shape != wanted:
            found = f"{list(weight.codes.shape)}, but config.json asks for {list(wanted)}"
            raise LoadError(f"{name} is stored as a matrix of shape {found}")
        return weight

    def _read_part(self, part: Part, ranges: Sequence[Ranges | None]) -> Tensor:
        stored, shape = self.stored[part.name], part.rows or part.shape
        if part.axes and shape is not None and stored.dtype in _DTYPES:
            stored = stored._replace(shape=shape)  # axes of size 1 may be missing or added
        return self._read(stored, ranges)

    def _read(self, stored: StoredTensor, ranges: Sequence[Ranges | None] = ()) -> Tensor:
        read = _as_part(stored, ranges) if any(ranges) else as_tensor(stored)
        self._bytes_read.note(read)
        return read


def as_tensor(stored: StoredTensor) -> Tensor:
    """As a torch tensor, in the file's own memory if possible. Types that torch lacks become the bytes of each row."""
    data = torch.frombuffer(stored.read(), dtype=torch.uint8)
    dtype = _DTYPES.get(stored.dtype)
    if dtype is None:
        return data.view(*stored.shape[:-1], -1)
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(stored.shape)


def part_of(tensor: Tensor, ranges: Sequence[Ranges | None]) -> Tensor:
    """Some ranges of each axis; a view, if there is one range for each axis."""
    for axis, its in enumerate(ranges):
        if its is not None and len(its) == 1:
            tensor = tensor.narrow(axis, its[0][0], its[0][1] - its[0][0])
    for axis, its in enumerate(ranges):
        if its is not None and len(its) > 1:
            tensor = torch.cat([tensor.narrow(axis, begin, end - begin) for begin, end in its], dim=axis)
    return tensor


def _as_part(stored: StoredTensor, ranges: Sequence[Ranges | None]) -> Tensor:
    """Ranges of a tensor; only their bytes are touched."""
    rows = ranges[0]
    if stored.read_rows is not None and rows is not None:
        return torch.cat([_as_rows(stored, begin, end, ranges[1:]) for begin, end in rows])
    dtype = _DTYPES.get(stored.dtype, torch.uint8)
    data = torch.frombuffer(stored.read(), dtype=torch.uint8)
    shape = stored.shape if stored.dtype in _DTYPES else (*stored.shape[:-1], -1)
    if data.data_ptr() % dtype.itemsize == 0:
        return part_of(data.view(dtype).view(shape), ranges)
    octets = part_of(data.view(*shape, dtype.itemsize), ranges).contiguous()
    return octets.view(dtype).squeeze(-1)


def _as_rows(stored: StoredTensor, begin: int, end: int, others: Sequence[Ranges | None]) -> Tensor:
    assert stored.read_rows is not None
    rows = stored._replace(shape=(end - begin, *stored.shape[1:]), read=partial(stored.read_rows, begin, end))
    return part_of(as_tensor(rows), (None, *others))
