"""The parts of an assistant's output, once its marks are understood."""

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
    is_custom: bool = False
    """Whether the tool takes a text instead of arguments."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallInput:
    """A piece of a custom tool's input: the text itself."""

    index: int
    text: str


Part = Reasoning | Content | CallStart | CallArguments | CallInput


def held_suffix(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is the beginning of a mark, but not all of it."""
    longest = 0
    for mark in marks:
        window = text[max(len(text) - len(mark) + 1, 0) :]
        at = window.find(mark[0])  # fast: it is hardly ever found
        while at >= 0 and not mark.startswith(window[at:]):
            at = window.find(mark[0], at + 1)
        if at >= 0:
            longest = max(longest, len(window) - at)
    return longest
