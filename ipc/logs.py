"""Passes log lines from structlog through a queue to a thread that writes them. Logging never waits and never fails.

    put ──▶ queue (bounded) ──▶ thread ──▶ descriptor
             full: dropped        fails: dropped     both are counted

We do not control what stderr is connected to: a pipe that nobody reads, a full disk, a terminal that is gone. The
thread may wait there for ever, but the process can still end.
"""

import atexit
import io
import logging
import os
import queue
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

_MAX_LINES = 4096
"""Limit of lines waiting to be written. With more, nobody is reading; the oldest are kept to show how it began."""

_MAX_LINE_BYTES = 1 << 14
_MAX_WRITE_BYTES = 1 << 18  # to a file; processes share a pipe, where only writes of at most PIPE_BUF bytes are atomic
_GATHER_SECONDS = 0.005
"""Pause after everything is written, so that under load lines are written together and the GIL is rarely needed."""

_FLUSH_SECONDS = 1.0
"""How long a process that ends waits for its last lines to be written."""


class LogSink:
    """Writes to a descriptor, in the order of `put`."""

    def __init__(self, descriptor: int, on_dropped: Callable[[int], None] = lambda count: None) -> None:
        """`on_dropped` is called with the number of lost lines once lines can be written again. It may `put` a line."""
        self._descriptor = descriptor
        self._on_dropped = on_dropped
        self._max_write_bytes = _MAX_WRITE_BYTES if _is_file(descriptor) else select.PIPE_BUF
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()  # may be used in signal handlers
        self._thread: threading.Thread | None = None
        self._num_refused = 0  # counted by callers of `put`
        self._num_failed = 0  # counted by the thread
        self._num_told = 0
        self._held: bytes | None = None  # taken from the queue, for the next write
        self._is_torn = False  # the last write ended in the middle of a line

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
        """Wait until everything put so far is written, for at most `seconds`; return whether it is."""
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
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals are for the main thread
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
        """Wait for a line, and take the lines already queued after it, up to the size of one write."""
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
            except BlockingIOError:  # another process made the pipe non-blocking: wait for room, as a write would
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
    """A text stream in place of `sys.stderr` or `sys.stdout`, which writes to the sink line by line."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, sink: LogSink, descriptor: int) -> None:
        self._sink = sink
        self._descriptor = descriptor
        self._rest = ""

    def write(self, text: str) -> int:
        """Take text; complete lines are passed on at once, the rest with `flush`."""
        lines, end, rest = (self._rest + text).rpartition("\n")
        self._rest = rest
        if end:
            self._sink.put(lines + end)
        return len(text)

    def flush(self) -> None:
        """Pass on an unfinished line too. Does not wait until it is written."""
        rest, self._rest = self._rest, ""
        if rest:
            self._sink.put(rest)

    def fileno(self) -> int:
        """The descriptor behind the sink."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always."""
        return True


_sink: LogSink | None = None
_is_console = False


class _SinkLogger:
    """The logger to which structlog passes finished lines."""

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink

    def msg(self, message: str) -> None:
        """Queue a line."""
        self._sink.put(message + "\n")

    log = debug = info = warning = error = critical = exception = msg


def setup_logging(process_name: str, level: str = "auto", log_format: str = "auto") -> None:
    """One line per event to stderr: readable on a terminal, JSON elsewhere (`auto`). `auto` logs info.

    Whatever else is written to `sys.stderr` (warnings, tracebacks, progress) goes the same way.
    """
    global _sink, _is_console
    if _sink is None:
        _sink = LogSink(2, lambda count: _tell_dropped(process_name, count))
        sys.stderr = SinkStream(_sink, 2)
        atexit.register(flush_logs)
    _is_console = log_format == "console" or (log_format == "auto" and os.isatty(2))
    sink = _sink
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if _is_console else "iso", utc=not _is_console),
            *([_console_renderer()] if _is_console else [_TRACEBACKS, structlog.processors.JSONRenderer()]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.INFO if level == "auto" else getattr(logging, level.upper())
        ),
        logger_factory=lambda *_: _SinkLogger(sink),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process_name)


# Tracebacks without local variables: those may hold prompts and keys, and fill screens.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def _console_renderer() -> structlog.typing.Processor:
    has_colors = os.isatty(2) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return structlog.dev.ConsoleRenderer(colors=has_colors, exception_formatter=structlog.dev.plain_traceback)


def refuse(reason: str) -> None:
    """Say why this process cannot start: in a sentence on a terminal, in a log line elsewhere."""
    if _is_console and _sink is not None:
        _sink.put(f"penstock: {reason}\n")
    else:
        structlog.get_logger().error("cannot start", reason=reason)


def num_dropped_log_lines() -> int:
    """Lines of this process that could not be written, since its start."""
    return 0 if _sink is None else _sink.num_dropped


def flush_logs() -> None:
    """Wait a moment for queued lines to be written."""
    if _sink is not None:
        with suppress(Exception):  # another logger may be configured by now
            sys.stderr.flush()
        _sink.flush(_FLUSH_SECONDS)


def _tell_dropped(process_name: str, count: int) -> None:
    structlog.get_logger().warning("log lines were dropped", process=process_name, count=count)
