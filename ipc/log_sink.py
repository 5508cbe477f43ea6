"""Where log lines go: a queue, and a thread that writes them. Whoever logs neither waits nor fails.

    put ──▶ queue (bounded) ──▶ thread ──▶ descriptor
             full: dropped        fails: dropped     both are counted

What stands behind stderr is not ours: a pipe that nobody reads, a disk that is full, a terminal that is gone. The
thread may wait there for ever, and the process may end meanwhile.
"""

import io
import os
import queue
import select
import signal
import stat
import threading
import time
from collections.abc import Callable

_MAX_LINES = 4096
"""Lines that wait to be written. More mean that nobody reads them, and the oldest say how it began."""

_MAX_LINE_BYTES = 1 << 14
_MAX_WRITE_BYTES = 1 << 18  # to a file; processes share a pipe, which takes no more than PIPE_BUF bytes whole
_GATHER_SECONDS = 0.005
"""Pause once all is written: under load, lines go out together, and the thread seldom takes the interpreter's lock."""


class LogSink:
    """Writes to a descriptor, in the order of `put`."""

    def __init__(self, descriptor: int, on_dropped: Callable[[int], None] = lambda count: None) -> None:
        """`on_dropped` is told how many lines were lost, once lines can be written again. It may `put` a line."""
        self._descriptor = descriptor
        self._on_dropped = on_dropped
        self._max_write_bytes = _MAX_WRITE_BYTES if _is_file(descriptor) else select.PIPE_BUF
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()  # may be used in signal handlers
        self._thread: threading.Thread | None = None
        self._num_refused = 0  # counted by those who put
        self._num_failed = 0  # counted by the thread
        self._num_told = 0
        self._held: bytes | None = None  # taken from the queue, for the next write
        self._is_torn = False  # the last write ended within a line

    @property
    def num_dropped(self) -> int:
        """Lines lost since the start: the queue was full, or writing failed."""
        return self._num_refused + self._num_failed

    def put(self, text: str) -> None:
        """Queue a piece of text, usually a line with its end."""
        if self._queue.qsize() >= _MAX_LINES:
            self._num_refused += 1
            return
        line = text.encode(errors="backslashreplace")
        if len(line) > _MAX_LINE_BYTES:
            line = line[: _MAX_LINE_BYTES - 4] + b"...\n"
        self._queue.put(line)
        if self._thread is None:
            self._start()

    def flush(self, seconds: float) -> bool:
        """Wait until all that was put so far is written, but no longer than `seconds`; whether it is."""
        if self._thread is None:
            return True
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(seconds)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no memory for a thread: the next line tries again
            self._thread = None

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        while True:
            lines, reached = self._gather()
            is_written = not lines or self._write(lines)
            if reached is not None:
                reached.set()
            if self._held is None and self._queue.empty():
                if is_written:
                    self._tell_dropped()
                time.sleep(_GATHER_SECONDS)

    def _gather(self) -> tuple[list[bytes], threading.Event | None]:
        """Wait for a line, and take what follows it already, as far as one write should go."""
        lines: list[bytes] = []
        size = 0
        item: bytes | threading.Event = self._queue.get() if self._held is None else self._held
        self._held = None
        while isinstance(item, bytes) and (not lines or size + len(item) <= self._max_write_bytes):
            lines.append(item)
            size += len(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return lines, None
        if isinstance(item, threading.Event):
            return lines, item
        self._held = item
        return lines, None

    def _write(self, lines: list[bytes]) -> bool:
        rest = memoryview(b"".join([b"\n"] * self._is_torn + lines))
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process has made the pipe so: wait for room, as a write would
                self._wait_for_room()
            except OSError:
                self._num_failed += len(lines)
                return False
            self._is_torn = bool(rest)
        return True

    def _wait_for_room(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        poller.poll()

    def _tell_dropped(self) -> None:
        dropped = self.num_dropped
        if dropped > self._num_told:
            count, self._num_told = dropped - self._num_told, dropped
            self._on_dropped(count)


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        return False


class SinkStream(io.TextIOBase):
    """A text stream in the place of `sys.stderr` or `sys.stdout`: what others write line by line goes into the sink."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, sink: LogSink, descriptor: int) -> None:
        self._sink = sink
        self._descriptor = descriptor
        self._rest = ""

    def write(self, text: str) -> int:
        """Take text; whole lines go on at once, the rest with `flush`."""
        lines, end, rest = (self._rest + text).rpartition("\n")
        self._rest = rest
        if end:
            self._sink.put(lines + end)
        return len(text)

    def flush(self) -> None:
        """Let what is left of a line go on, too. Does not wait until it is written."""
        rest, self._rest = self._rest, ""
        if rest:
            self._sink.put(rest)

    def fileno(self) -> int:
        """The descriptor behind the sink."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a terminal stands there."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always."""
        return True
