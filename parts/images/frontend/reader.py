"""Reads the images of requests off the event loop, and keeps their pixel values in shared memory.

    source --base64, or fetched--> file --a process that can be killed--> pixel values in a segment --> engine

A segment is held by the requests that use it. Afterwards it is kept until its space is needed, because most
conversations send their images again with each turn. Equal images that arrive at the same time are read once.
"""

import asyncio
import binascii
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from penstock.frontend.errors import ApiError, Overloaded, UnsupportedParameter
from penstock.frontend.image_source import ImageLimits, ImageSource, without_blanks
from penstock.frontend.text.child_pool import ChildDiedError, ChildPool, ChildTooSlowError, ChildUnusableError
from penstock.frontend.text.fair_slots import FairSlots
from penstock.ipc import shared_files
from penstock.ipc.messages import PixelTensor
from penstock.ipc.shared_files import NoRoomError, SharedFiles
from penstock.parts.images.families import Placeholder
from penstock.parts.images.frontend.fetch import FetchRefusedError, ImageFetcher

log = structlog.get_logger()

MAX_READ_SECONDS = 20.0
"""Time limit for decoding one image and computing its pixel values; large ones take half a second."""

_NUM_PROCESSES = 2
_NUM_FILES = 8  # images that wait for a process, or are in one; others wait in their requests
_MAX_WAITING = 8192  # the largest possible number of connections
_PARTS = 8  # one image may take this fraction (1/8) of the memory for pixel values
_SLICE = 1 << 18  # base64 is decoded in pieces of this size, because other threads wait for each piece


class Pixels(NamedTuple):
    """The tower's inputs for an image: tensors in a file."""

    segment: str  # name of a shared file
    num_bytes: int
    tensors: tuple[PixelTensor, ...]


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image that is ready to be sent to the engine."""

    key: bytes
    placeholder: Placeholder
    pixels: Pixels


class _Entry:
    """An image that is being read, or has been."""

    __slots__ = ("is_read", "num_bytes", "num_holders", "task")

    def __init__(self, task: asyncio.Task[ReadImage]) -> None:
        self.task = task
        self.num_holders = 0
        self.is_read = False
        self.num_bytes = 0


class ImageHold:
    """The images that one request holds."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._is_released = False

    def take(self, entry: _Entry) -> None:
        """Hold one more image."""
        if not self._is_released:
            entry.num_holders += 1
            self._entries.append(entry)

    def release(self) -> None:
        """Release all images. Idempotent."""
        self._is_released = True
        for entry in self._entries:
            entry.num_holders -= 1
        self._entries.clear()


class ImageReader:
    """Reads images for one model; lives in a running event loop until `close`."""

    def __init__(self, model: Path, limits: ImageLimits, *, hosts: tuple[str, ...], max_bytes: int) -> None:
        """`model`: the checkpoint's path. `hosts`: where images are fetched. `max_bytes`: of all pixel values."""
        self._limits = limits
        self._max_total = max_bytes
        self._max_one = self._max_total // _PARTS
        self._children = ChildPool(
            "penstock.parts.images.child.read",
            (str(model), str(max(self._max_one, limits.max_bytes))),
            max_processes=_NUM_PROCESSES,
            max_queued=_NUM_FILES,
            max_answer_bytes=1 << 20,
            max_short=1 << 20,  # any question
        )
        self.fetcher = ImageFetcher(hosts, max_bytes=limits.max_bytes, seconds=limits.seconds)
        self._files_here = SharedFiles(self._max_total + _NUM_FILES * limits.max_bytes)
        self._entries: dict[bytes, _Entry] = {}  # by the digest of what was sent; least recently used first
        self._num_bytes = 0  # of all segments
        self._num_reserved = 0  # bytes for segments that are being written
        self._files = FairSlots(_NUM_FILES, _MAX_WAITING, "for their images to be received")
        self._processes = FairSlots(_NUM_PROCESSES, _MAX_WAITING, "for their images to be read")

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that pixel values take, or may take soon."""
        return self._num_bytes + self._num_reserved

    async def warm(self) -> None:
        """Start a process before the first image arrives."""
        if why := await self._children.warm():
            log.warning("images cannot be read", reason=why)

    async def close(self) -> None:
        """End the processes, and remove all segments."""
        tasks = [entry.task for entry in self._entries.values() if not entry.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._children.close()
        self._files_here.close()

    async def read(self, sources: Sequence[ImageSource], hold: ImageHold, client: str) -> list[ReadImage]:
        """Read a client's images in its turns; `hold` keeps them until it is released.

        Raises:
            InvalidImage: an image cannot be read or fetched.
            UnsupportedParameter: this server lacks what is needed to read images.
            Overloaded, Unavailable: images cannot be read now.
        """
        found = await asyncio.gather(*(self._read(each, hold, client) for each in sources), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, ReadImage)]

    async def _read(self, source: ImageSource, hold: ImageHold, client: str) -> ReadImage:
        async with self._files.slot(client):
            file = self._files_here.reserve(self._limits.max_bytes)
            entry: _Entry | None = None
            try:
                digest, size = await self._received(source, file)
                entry = self._entries.pop(digest, None)
                if entry is None:
                    entry = _Entry(asyncio.create_task(self._processed(digest, file, size, source, client)))
                    entry.task.add_done_callback(_noticed)
                self._entries[digest] = entry  # now the most recently used
                hold.take(entry)
                try:
                    return await asyncio.shield(entry.task)
                except ApiError as error:  # perhaps of another request, whose field it names
                    raise type(error)(
                        error.message.replace("{field}", source.field),
                        param=source.field,
                        retry_after=error.retry_after,
                    ) from None
            finally:
                if entry is None or entry.task.done():
                    self._files_here.remove(file)
                else:  # its client has left, but the process goes on reading
                    entry.task.add_done_callback(lambda _: self._files_here.remove(file))

    async def _received(self, source: ImageSource, file: str) -> tuple[bytes, int]:
        """Put an image's bytes into a file; return their digest and number."""
        try:
            data = await self.fetcher.fetch(source.address) if source.address else source.data
            digest, size = await asyncio.to_thread(_stored, data, file)
        except FetchRefusedError as error:
            raise source.refused(str(error)) from None
        except (binascii.Error, ValueError):
            raise source.refused("its data is not valid base64") from None
        except NoRoomError:
            raise Overloaded("the shared memory has no room for an image", retry_after=1) from None
        self._files_here.settle(file, size)
        return digest + bytes([source.is_low]), size

    async def _processed(self, digest: bytes, file: str, size: int, source: ImageSource, client: str) -> ReadImage:
        # The request that asked first may leave, so `{field}` stands for the field of whichever request gets the error.
        target = ""
        entry = None
        try:
            async with self._processes.slot(client, "short"):  # the number of pixels bounds its time
                self._make_room()
                target = self._files_here.reserve(self._max_one)
                self._num_reserved += self._max_one
                try:
                    made = await self._ask(file, size, target, source, client)
                finally:
                    self._num_reserved -= self._max_one
            entry = self._entries[digest]
            entry.is_read, entry.num_bytes = True, made.pixels.num_bytes
            self._num_bytes += entry.num_bytes
            self._files_here.settle(target, entry.num_bytes)
            return made
        finally:
            if entry is None:
                self._entries.pop(digest, None)
                if target:
                    self._files_here.remove(target)

    async def _ask(self, file: str, size: int, target: str, source: ImageSource, client: str) -> ReadImage:
        question = [file, size, target, self._limits.max_pixels, source.is_low, self._max_one]
        refused = ImageSource("{field}", "", "").refused
        try:
            kind, error, *made = await self._children.ask(question, MAX_READ_SECONDS, client)
        except ChildTooSlowError:
            raise refused(f"it takes longer than {MAX_READ_SECONDS:g} seconds") from None
        except ChildDiedError:
            raise refused("it takes too much memory, or crashes the decoder") from None
        except ChildUnusableError as unusable:
            raise UnsupportedParameter(str(unusable)) from None
        if kind == "full":
            raise Overloaded(error, retry_after=1)
        if kind:
            raise refused(error)
        key, placeholder, num_bytes, tensors = msgspec.convert(made[0], _Told)
        return ReadImage(bytes.fromhex(key), placeholder, Pixels(target, num_bytes, tensors))

    def _make_room(self) -> None:
        """Remove segments that no request holds, until one more may be written."""
        for digest, entry in list(self._entries.items()):
            if self.num_bytes + self._max_one <= self._max_total:
                return
            if entry.is_read and not entry.num_holders:
                del self._entries[digest]
                self._num_bytes -= entry.num_bytes
                self._files_here.remove(entry.task.result().pixels.segment)
        if self.num_bytes + self._max_one > self._max_total:
            raise Overloaded(
                f"the images of requests in progress take all of --image-memory-gib ({self._max_total >> 20} MiB)",
                retry_after=1,
            )


def _noticed(task: asyncio.Task[ReadImage]) -> None:
    """Retrieve a task's error, so that it is not logged if the requests that wait for it have left."""
    if not task.cancelled():
        task.exception()


_Told = tuple[str, Placeholder, int, tuple[PixelTensor, ...]]


def _stored(data: str | bytes, file: str) -> tuple[bytes, int]:
    """Write an image, as it is or decoded from base64, in a thread; return its digest and number of bytes."""
    digest, size = hashlib.blake2b(digest_size=32), 0

    def pieces() -> Iterator[bytes]:
        nonlocal size
        given = data if isinstance(data, bytes) else without_blanks(data)
        for begin in range(0, len(given), _SLICE):
            piece = given[begin : begin + _SLICE]
            decoded = binascii.a2b_base64(piece, strict_mode=True) if isinstance(piece, str) else piece
            digest.update(decoded)
            size += len(decoded)
            yield decoded

    shared_files.write(file, pieces())
    return digest.digest(), size
