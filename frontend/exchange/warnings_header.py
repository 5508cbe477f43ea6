"""What a client is told beside an answer: that a part of its request was honoured in another way than it may expect.

    x-penstock-warning: field: what was done instead; another field: ...

Whoever reads a request adds sentences to `ValidRequest.warnings`, or to its `RequestRecord`; they stand in one header
of the answer, a stream's too, in the order in which they came. What cannot be honoured at all is refused instead.
"""

from collections.abc import Iterable

HEADER = "x-penstock-warning"

MAX_BYTES = 2048
"""Of the header's value: clients and proxies bound what they read."""


def warning_headers(warnings: Iterable[str]) -> dict[str, str]:
    """The header for these sentences; none if there are none. Each is told once."""
    texts = [_printable(warning) for warning in dict.fromkeys(warnings)]
    kept: list[str] = []
    room = MAX_BYTES - len("; and 9999 more")
    for text in texts:
        if len(text) + 2 > room:
            break
        kept.append(text)
        room -= len(text) + 2
    if left := len(texts) - len(kept):
        kept.append(f"and {left} more")
    return {HEADER: "; ".join(kept)} if kept else {}


def _printable(text: str) -> str:
    """Headers hold ASCII without line breaks: a client's own words may be in a warning."""
    escaped = text.encode("ascii", "backslashreplace").decode()
    return "".join(char if " " <= char <= "~" else " " for char in escaped)
