"""The framing of server-sent events, which no other file knows."""

from penstock.frontend.errors import ApiError, error_body

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # nginx must not buffer events
}

PREFIX = b"data: "
SUFFIX = b"\n\n"
DONE = b"data: [DONE]\n\n"
"""OpenAI's mark of a complete stream; never sent after an error."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment that clients ignore; it keeps proxies from closing a silent stream."""


def event(data: bytes) -> bytes:
    """Frame one event. `data` is one line (JSON never holds a raw line break)."""
    return PREFIX + data + SUFFIX


def named_event(name: str, data: bytes) -> bytes:
    """Frame one event that has its name outside the data too."""
    return b"event: " + name.encode() + b"\n" + PREFIX + data + SUFFIX


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after its first byte."""
    return event(error_body(error))
