"""Files in shared memory, for what is too large to travel in messages: written once, read by another process, removed.

    owner    SharedFiles: a folder of its own, a limit on its bytes; it names files and removes them
    writer   write(name, buffers), in the owner's process or in a child of it
    reader   read(name, num_bytes): a copy, so that later changes do not affect it
    anybody  clear_leftovers(): removes the folders of owners that have ended without removing them

A folder is locked while its owner lives; the kernel unlocks it however the owner ends. Process ids would not do:
containers that share this memory may have the same ones.
"""

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from secrets import token_hex

_PREFIX = "penstock-shared-"
_LOCK = "owner"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]+/[0-9a-f]+")
_SECONDS_TO_BEGIN = 60.0
"""If a folder is still not locked after this long, its owner has ended before it could lock it."""

Bytes = bytes | bytearray | memoryview


class NoRoomError(RuntimeError):
    """The files would take more than the limit, or than shared memory has."""


def shared_folder() -> Path:
    """Return where shared memory is: Linux's, or else the folder for temporary files."""
    path = Path("/dev/shm")
    return path if os.access(path, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class SharedFiles:
    """The files of one owner, which must call `close`; after its death, `clear_leftovers` removes them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # reserved
        self._sizes: dict[str, int] = {}
        base = shared_folder()
        self._folder = base / f"{_PREFIX}{token_hex(8)}"
        new = base / f"{_PREFIX}new-{token_hex(8)}"  # named so that it is not taken for a leftover before it is locked
        new.mkdir(mode=0o700)
        self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self._folder)

    def __len__(self) -> int:
        return len(self._sizes)

    def reserve(self, num_bytes: int) -> str:
        """Return the name for a new file of this size; any process that is given the name may write it.

        Raises:
            NoRoomError: the owner's files would exceed its limit.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise NoRoomError(
                f"{num_bytes} bytes do not fit: {self.num_bytes} of {self.max_bytes} bytes of shared memory are in use"
            )
        name = f"{self._folder.name}/{token_hex(8)}"
        self._sizes[name] = num_bytes
        self.num_bytes += num_bytes
        return name

    def settle(self, name: str, num_bytes: int) -> None:
        """Reduce a reservation: the file has turned out to be smaller."""
        self.num_bytes -= self._sizes[name] - num_bytes
        self._sizes[name] = num_bytes

    def remove(self, name: str) -> None:
        """Remove a file, written or not. Readers keep their copies."""
        self.num_bytes -= self._sizes.pop(name, 0)
        _path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        self._sizes.clear()
        self.num_bytes = 0
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def write(name: str, buffers: Iterable[Bytes]) -> None:
    """Write a file that was reserved: the buffers one after the other.

    Raises:
        NoRoomError: shared memory is full; there is no file.
    """
    path = _path(name)
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            for buffer in buffers:
                rest = memoryview(buffer).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
    except OSError as error:
        path.unlink(missing_ok=True)
        raise NoRoomError(f"{path.parent.parent}: {error.strerror}") from None


def read(name: str, num_bytes: int) -> bytearray:
    """Return a copy of a file's bytes.

    Raises:
        FileNotFoundError: it was removed, or its owner has ended.
        ValueError: it is not the name of a shared file, or the file has another size.
    """
    handle = os.open(_path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or status.st_size != num_bytes:
            raise ValueError(f"{name} has {status.st_size} bytes of user {status.st_uid}, not {num_bytes} of ours")
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            count = file.readinto(rest)
            if not count:
                raise ValueError(f"{name} has become shorter while it was read")
            rest = rest[count:]
        return data


def clear_leftovers() -> int:
    """Remove the folders of this user whose owners have ended; return how many."""
    count = 0
    for folder in shared_folder().glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid == os.geteuid() and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
        except FileNotFoundError:  # its owner, or another process that clears leftovers, was faster
            continue
    return count


def _is_left(folder: Path) -> bool:
    if folder.name.startswith(f"{_PREFIX}new-"):
        return time.time() - folder.stat().st_mtime > _SECONDS_TO_BEGIN
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # its removal was interrupted
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _path(name: str) -> Path:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not the name of a shared file")
    return shared_folder() / name
