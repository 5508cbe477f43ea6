"""Log lines: structlog into a sink that neither blocks nor fails (`log_sink.py`)."""

import atexit
import logging
import os
import sys
from contextlib import suppress

import structlog

from penstock.ipc.log_sink import LogSink, SinkStream

_FLUSH_SECONDS = 1.0
"""Time that an ending process gives its last lines to be written."""

_sink: LogSink | None = None
_is_console = False


class _SinkLogger:
    """What structlog passes a finished line to."""

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink

    def msg(self, message: str) -> None:
        """Queue a line."""
        self._sink.put(message + "\n")

    log = debug = info = warning = error = critical = exception = msg


def setup_logging(process_name: str, level: str = "auto", log_format: str = "auto") -> None:
    """One line per event to stderr: readable on a terminal, JSON elsewhere (`auto`). `auto` logs info.

    What other code writes to `sys.stderr` (warnings, tracebacks, progress) goes the same way.
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
    return structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)


def refuse(reason: str) -> None:
    """Say why this process cannot start: a sentence for a person at a terminal, a log line elsewhere."""
    if _is_console and _sink is not None:
        _sink.put(f"penstock: {reason}\n")
    else:
        structlog.get_logger().error("cannot start", reason=reason)


def num_dropped_log_lines() -> int:
    """Lines of this process that could not be written, since its start."""
    return 0 if _sink is None else _sink.num_dropped


def flush_logs() -> None:
    """Give waiting lines a moment to be written."""
    if _sink is not None:
        with suppress(Exception):  # another logger may be configured by now
            sys.stderr.flush()
        _sink.flush(_FLUSH_SECONDS)


def _tell_dropped(process_name: str, count: int) -> None:
    structlog.get_logger().warning("log lines were dropped", process=process_name, count=count)
