"""What an assistant's output is made of, once its marks are understood."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; calls are counted from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments


def held_suffix(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a mark without completing it."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(len(mark) > length and mark.startswith(end) for mark in marks):
            return length
    return 0
