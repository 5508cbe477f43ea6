"""Writes a recording's lines to its files in a thread, so that the recorder never waits for a disk or a reader.

    offer ──▶ pending, at most MAX_PENDING_BYTES ──thread, every FLUSH_SECONDS──▶ FILE
    begin_part ─┘                                   FILE becomes FILE.1, which becomes FILE.2 ...; the oldest goes

Lines that cannot be written are dropped and counted: a full or slow disk, or a pipe without a reader, costs only lines.
After a failure the file is opened again.
"""

import errno
import os
import stat
import threading
from collections import deque
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import structlog

log = structlog.get_logger()

_HEADER = b'{"kind":"header"'
"""The beginning of every recording."""

FLUSH_SECONDS = 0.1
MAX_PENDING_BYTES = 16 << 20
NUM_PARTS = 4
"""Most files of a recording."""
CLOSE_SECONDS = 2.0
"""How long the end of the program may wait for pending lines."""


class RecordingWriter:
    """The files and the thread that writes them. All methods must be called from one other thread."""

    def __init__(self, path: Path) -> None:
        """Start the thread, which opens the file. An existing recording is continued."""
        self._path = path
        self.part_bytes = path.stat().st_size if path.is_file() else 0
        """Size of the newest file, including lines pending for it."""
        self._pending: deque[bytes | None] = deque()  # None: a new part begins here
        self._num_offered = 0  # bytes ever
        self._num_done = 0  # bytes ever written or lost
        self._num_refused = 0  # lines
        self._num_unwritten = 0  # lines
        self._file = -1
        self._must_rotate = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-recording", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Lines that were dropped so far."""
        return self._num_refused + self._num_unwritten

    def offer(self, line: bytes) -> bool:
        """Queue a line. False if too much is pending already; the line is then lost."""
        if self._num_offered - self._num_done + len(line) > MAX_PENDING_BYTES:
            self._complain("it takes lines more slowly than they come")
            self._num_refused += 1
            return False
        self._num_offered += len(line)
        self.part_bytes += len(line)
        self._pending.append(line)
        return True

    def begin_part(self) -> None:
        """Write lines offered from now on to a new file."""
        self.part_bytes = 0
        self._pending.append(None)

    def close(self) -> None:
        """Write pending lines for at most CLOSE_SECONDS, and end the thread."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)

    # --- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(FLUSH_SECONDS)
            while self._pending:
                self._write_some()
        self._close_file()

    def _write_some(self) -> None:
        """Write the lines pending for one file."""
        if self._pending[0] is None:
            self._must_rotate = True
            self._pending.popleft()
        taken: list[bytes] = []
        while self._pending and (lines := self._pending[0]) is not None:
            taken.append(lines)
            self._pending.popleft()
        rest = memoryview(b"".join(taken))
        num_bytes = len(rest)
        try:
            file = self._opened()
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError as error:
            self._complain(error.strerror or str(error))
            self._num_unwritten += bytes(rest).count(b"\n")
            self._close_file()
        self._num_done += num_bytes

    def _opened(self) -> int:
        if self._must_rotate:
            self._close_file()
            if self._path.is_file():
                self._rotate()
            self._must_rotate = False
        if self._file < 0:
            if not may_hold_recording(self._path):
                raise FileExistsError(errno.EEXIST, "it is no recording")
            is_at_line_start = _ends_with_a_line(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                os.fchmod(self._file, 0o600)
            if not is_at_line_start:
                os.write(self._file, b"\n")
        return self._file

    def _rotate(self) -> None:
        files = [self._path, *(self._path.with_name(f"{self._path.name}.{age}") for age in range(1, NUM_PARTS))]
        for newer, older in reversed(list(pairwise(files))):
            with suppress(FileNotFoundError):
                newer.replace(older)

    def _close_file(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def _complain(self, reason: str) -> None:
        if not self.num_lost:  # log only the first loss
            log.error("recording lines lost", file=str(self._path), reason=reason)


def may_hold_recording(path: Path) -> bool:
    """Whether lines may be added: the file is missing, empty, a recording, a pipe or a device.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():
        return True
    with path.open("rb") as file:
        begin = file.read(len(_HEADER))
    return begin == _HEADER[: len(begin)]


def _ends_with_a_line(path: Path) -> bool:
    """Whether the next write begins a line; False if that is unknown."""
    if not path.is_file():
        return not path.exists()
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
