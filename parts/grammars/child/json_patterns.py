"""Regular expressions as the grammar library reads them within JSON."""

import re


def within_json(pattern: str) -> str:
    """The expression as the grammar library must be told it for the texts of JSON strings.

    Where a class has all control characters, the library takes every escape for one of them, those of `"` and `\\`
    included. So a class that excludes one of these two loses NUL, which no model writes.
    """
    written, at = [], 0
    while at < len(pattern):
        end = _end_of_item(pattern, at)
        item = pattern[at:end]
        written.append(rf"[{item}&&[^\x00]]" if _lets_marks_in(item) else item)
        at = end
    return "".join(written)


def _end_of_item(pattern: str, at: int) -> int:
    """Where a class ends, an escape, or any other character, in the library's syntax, whose classes may be nested."""
    if pattern[at] == "\\":
        found = _ESCAPE.match(pattern, at)
        return found.end() if found else len(pattern)
    if pattern[at] != "[":
        return at + 1
    depth = 0
    for part in _PART_OF_CLASS.finditer(pattern, at):
        depth += {"[": 1, "]": -1}.get(part[0][0], 0)
        if not depth:
            return part.end()
    return len(pattern)


_ESCAPE = re.compile(r"\\(?:[pP](?:\{[^}]*\}|.)|.)", re.DOTALL)
_PART_OF_CLASS = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
"""A bracket that comes first stands for itself."""
_OPERATION = re.compile(r"\[|&&|--|~~|\|\|")
"""Within a class: what the library's syntax has, and Python's has not."""


def _lets_marks_in(item: str) -> bool:
    """Whether an item may have NUL, and not both `"` and `\\`."""
    if len(item) < 3 or (item[0] == "[" and item[-1] != "]"):  # one character, `\\d` and its like, or no whole class
        return False
    if _OPERATION.search(re.sub(r"\\.", "", item[1:], flags=re.DOTALL)):
        return True
    try:
        kind = re.compile(item)
    except re.error:  # the library knows more than Python
        return True
    return bool(kind.match("\0")) and not (kind.match('"') and kind.match("\\"))
