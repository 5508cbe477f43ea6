"""GGUF's container format: metadata, the list of tensors, and their bytes, in one file or in several parts.

    magic, version, numbers of tensors and keys │ keys with values │ tensors' names, shapes, types, offsets │ bytes

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package is not used, because it makes
several numpy arrays of each token: that takes seconds for a large vocabulary, in each process that opens a file. The
tests compare the two readers.
"""

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any, NamedTuple, overload

from penstock.models.files.source import Incomplete, LoadError, StoredTensor
from penstock.models.gguf.block_types import BLOCK_TYPES, BY_NUMBER, FLOATS, UNREAD
from penstock.models.parsing.json_fields import shown

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_USUAL_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_ITEMS = 1 << 23
"""Of an array of metadata: the largest vocabularies have a quarter of a million tokens and twice as many merges."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


class Container(NamedTuple):
    """The contents of a model's file, or of all its parts."""

    metadata: dict[str, Any]  # of the first part; arrays are sequences
    tensors: dict[str, StoredTensor]  # by GGUF's names; shapes are [..., outputs, inputs], as in torch
    header: memoryview  # of the first part: the bytes that the metadata was read from


def read_container(path: Path) -> Container:
    """Read the headers of a file and of its other parts.

    Raises:
        LoadError: a file is damaged or missing, or has an unsupported tensor type.
    """
    first, *others = part_paths(path)
    metadata, tensors, header = _read_part(first)
    for other in others:
        its = _read_part(other).tensors
        if twice := next((name for name in its if name in tensors), None):
            raise LoadError(f"{str(other)!r} has the tensor {shown(twice)}, which another part has, too")
        tensors |= its
    count = metadata.get("split.tensors.count")
    if isinstance(count, int) and count != len(tensors):
        raise LoadError(f"{str(first)!r} and its parts should have {count} tensors and have {len(tensors)}")
    return Container(metadata, tensors, header)


def container_of(path: Path, data: memoryview) -> Container:
    """Read the header of a single file whose bytes are in memory.

    Raises:
        LoadError: as in `read_container`.
    """
    return _read_part(path, lambda: data)


def part_names(name: str) -> list[str]:
    """Return the name, or the names of all parts if it names one of several."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    return [f"{found['stem']}-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]


def part_paths(path: Path) -> list[Path]:
    """Return the file, and all other parts if its name says that it is one of several.

    Raises:
        Incomplete: some are missing.
    """
    parts = [path] if (names := part_names(path.name)) == [path.name] else [path.with_name(name) for name in names]
    absent = [part.name for part in parts if part != path and not part.is_file()]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise Incomplete(
            f"{str(path)!r} is one of {len(parts)} parts, of which {', '.join(absent[:3])}{more} "
            f"{'is' if len(absent) == 1 else 'are'} missing; is the download complete?"
        )
    return parts


def gguf_models(names: Iterable[str]) -> list[str]:
    """Return the files that are text models: the first of several parts, and no image encoders."""
    found = []
    for name in sorted(names):
        part = _PART.fullmatch(name)
        if not name.startswith("mmproj") and (part is None or int(part["number"]) == 1):
            found.append(name)
    return found


class Strings(Sequence[str]):
    """An array of strings, decoded when it is iterated."""

    def __init__(self, data: memoryview, begin: int, count: int) -> None:
        self._data, self._begin, self._count = data, begin, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        data, at, length = self._data, self._begin, _U64.unpack_from
        for _ in range(self._count):
            begin = at + 8
            at = begin + length(data, at)[0]
            yield str(data[begin:at], "utf-8", "replace")

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return list(self)[index]


class _Cursor:
    """A position in a file's bytes, which advances with each read.

    Raises:
        struct.error, ValueError: the file ends too early, or is not valid GGUF.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def number(self, kind: struct.Struct) -> Any:
        """A scalar."""
        (value,) = kind.unpack_from(self._data, self.at)
        self.at += kind.size
        return value

    def string(self) -> str:
        """A string."""
        return str(self._take(self.number(_U64)), "utf-8", "replace")

    def value(self) -> Any:
        """A value, preceded by the number of its type."""
        kind = self.number(_U32)
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"values of type {kind} are unknown")
        kind, count = self.number(_U32), self.number(_U64)
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise ValueError(f"arrays of type {kind} are unknown")
        if count > _MAX_ITEMS:
            raise ValueError(f"an array has {count} items; at most {_MAX_ITEMS} are read")
        item = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{item.format[1:]}", self._take(count * item.size)))

    def _strings(self, count: int) -> Strings:
        if count > _MAX_ITEMS:
            raise ValueError(f"an array has {count} strings; at most {_MAX_ITEMS} are read")
        begin, at, data, length = self.at, self.at, self._data, _U64.unpack_from
        for _ in range(count):
            at += 8 + length(data, at)[0]
        if at > len(data):
            raise ValueError("a string goes on after it")
        self.at = at
        return Strings(data, begin, count)

    def _take(self, num_bytes: int) -> memoryview:
        end = self.at + num_bytes
        if end > len(self._data):
            raise ValueError("a value goes on after it")
        taken = self._data[self.at : end]
        self.at = end
        return taken


class _Info(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_part(path: Path, mapped: Callable[[], memoryview] | None = None) -> Container:
    mapped = mapped or cache(partial(_mapped, path))
    data = mapped()
    cursor = _Cursor(data)
    _check_beginning(path, data)
    cursor.at = 8
    try:
        num_tensors, num_keys = cursor.number(_U64), cursor.number(_U64)
        metadata = {cursor.string(): cursor.value() for _ in range(num_keys)}
        infos = [_info(cursor) for _ in range(num_tensors)]
    except (struct.error, ValueError, OverflowError) as error:
        why = "it ends within its header" if isinstance(error, struct.error | OverflowError) else str(error)
        raise LoadError(
            f"{str(path)!r} has {len(data)} bytes, and its header is cut off or damaged ({why}); download it again"
        ) from None
    alignment = metadata.get("general.alignment", _USUAL_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise LoadError(f"{str(path)!r} is damaged: general.alignment is {shown(repr(alignment))}")
    begin = -(-cursor.at // alignment) * alignment
    tensors = {info.name: _stored(path, info, begin, len(data), mapped) for info in infos}
    if len(tensors) != len(infos):
        raise LoadError(f"{str(path)!r} is damaged: it lists a tensor twice")
    return Container(metadata, tensors, data[: cursor.at])


def _check_beginning(path: Path, data: memoryview) -> None:
    if bytes(data[:4]) != MAGIC:
        is_pointer = bytes(data[:7]) == b"version"
        what = "a Git LFS pointer: `git lfs pull` fetches it" if is_pointer else "not what its name says"
        raise LoadError(f"{str(path)!r} is no GGUF file (it does not begin with GGUF): it is {what}")
    version = _U32.unpack_from(data, 4)[0] if len(data) >= 8 else 0
    if version not in _VERSIONS:
        said = "big-endian" if version and not version & 0xFFFF else f"version {version} of the format"
        raise LoadError(f"{str(path)!r} is {said}; little-endian files of versions 2 and 3 are read")


def _info(cursor: _Cursor) -> _Info:
    name, num_dims = cursor.string(), cursor.number(_U32)
    if not 0 < num_dims <= _MAX_DIMS:
        raise ValueError(f"a tensor has {num_dims} dimensions")
    shape = tuple(cursor.number(_U64) for _ in range(num_dims))
    return _Info(name, shape[::-1], cursor.number(_U32), cursor.number(_U64))


def _stored(path: Path, info: _Info, begin: int, file_bytes: int, mapped: Callable[[], memoryview]) -> StoredTensor:
    kind = BY_NUMBER.get(info.kind)
    if kind is None:
        raise LoadError(
            f"{str(path)!r} has tensors of type {UNREAD.get(info.kind, f'number {info.kind}')} "
            f"({shown(info.name)}), which are not supported; supported: {', '.join(FLOATS | BLOCK_TYPES)}"
        )
    its = (FLOATS | BLOCK_TYPES)[kind]
    if info.shape[-1] % its.num_elements:
        raise LoadError(
            f"{str(path)!r} is damaged: {shown(info.name)} has rows of {info.shape[-1]} numbers, "
            f"but a block of {kind} has {its.num_elements}"
        )
    num_bytes = math.prod(info.shape) // its.num_elements * its.num_bytes
    first = begin + info.offset
    if first + num_bytes > file_bytes:
        raise LoadError(
            f"{str(path)!r} is cut off: {shown(info.name)} ends at byte {first + num_bytes}, but the file has "
            f"{file_bytes}; download it again"
        )
    return StoredTensor(info.shape, kind, num_bytes, lambda: mapped()[first : first + num_bytes])


def _mapped(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:  # a private mapping: torch requires writable memory
            return memoryview(mmap(file.fileno(), 0, access=ACCESS_COPY))
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        said = error.strerror if isinstance(error, OSError) else "it is empty; download it again"
        raise LoadError(f"cannot read {str(path)!r}: {said}") from None
