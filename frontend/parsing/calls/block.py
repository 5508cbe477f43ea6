"""Text of a block of calls, read from its front by a generator that waits at `yield` for more to come.

A format's reader asks for what it needs (`yield from block.until("</tool_call>")`), and writes what it finds
(`start_call`, `add`). No answer depends on how the text was cut: each waits until it is certain, or until the
text has ended.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from penstock.frontend.parsing.parts import CallArguments, CallStart, Part, held_suffix

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads some of a block; yields when it needs more text."""

MAX_UNDECIDED = 32768
"""Characters after which what shows no name of a call is taken for text."""

_LOOK_AHEAD = 1024
"""More than any reader looks ahead of what it has taken."""

SPACE = " \t\r\n"


class NoCallError(Exception):
    """What was taken for a call is none."""


class EndOfTextError(Exception):
    """The text ended before what was waited for."""


class Block:
    """The text from a block's opening on, and the calls found in it."""

    def __init__(self, names: frozenset[str], make_id: Callable[[], str], *, parallel: bool, num_calls: int) -> None:
        """`names` are those of the offered tools; without `parallel` only the first call of all counts."""
        self.names = names
        self.num_calls = num_calls
        self.is_final = False
        self.is_in_call = False
        self.has_calls = False
        """Of this block."""
        self._make_id = make_id
        self._parallel = parallel
        self._text = ""
        self._at = 0  # what is before was read
        self._settled = 0  # what is before is understood, and never given back
        self._num_dropped = 0  # characters that the text has lost at its front
        self._parts: list[Part] = []
        self._arguments: list[str] = []

    # --- for the parser ---------------------------------------------------------------------

    def feed(self, text: str) -> None:
        """More text has come."""
        settled = self._settled
        self._text = text if settled == len(self._text) else self._text[settled:] + text
        self._at -= settled
        self._num_dropped += settled
        self._settled = 0

    def parts(self) -> list[Part]:
        """What was found since the last time."""
        if self._arguments:
            self._flush()
        if not self._parts:
            return []
        parts, self._parts = self._parts, []
        return parts

    @property
    def rest(self) -> str:
        """What was not read."""
        return self._text[self._at :]

    @property
    def unsettled(self) -> str:
        """What was not read, or read and not understood."""
        return self._text[self._settled :]

    @property
    def num_unsettled(self) -> int:
        """Characters that were read and not understood."""
        return self._at - self._settled

    # --- reading ----------------------------------------------------------------------------

    def more(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            EndOfTextError: if none comes.
            NoCallError: if it has been too long without a call's name.
        """
        if self.is_final:
            raise EndOfTextError
        if not self.is_in_call and len(self._text) - self._settled > MAX_UNDECIDED + _LOOK_AHEAD:
            raise NoCallError
        yield

    def peek(self, count: int = 1) -> Reading[str]:
        """The next characters; fewer only at the end of the text."""
        while len(self._text) - self._at < count and not self.is_final:
            yield from self.more()
        return self._text[self._at : self._at + count]

    def goes_on(self) -> Reading[None]:
        """Wait for a character.

        Raises:
            EndOfTextError: if none comes.
        """
        if not (yield from self.peek()):
            raise EndOfTextError

    def take(self, count: int) -> str:
        """Read characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        return text

    def pass_over(self, count: int) -> None:
        """Read characters that are there and known."""
        self._at += count

    def back(self, count: int) -> None:
        """Give back the characters that were read last."""
        self._at -= count

    def skip(self, characters: str = SPACE) -> Reading[None]:
        """Read over these characters, up to another one or the end of the text."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in characters:
                    return
                self._at += 1
            if self.is_final:
                return
            yield from self.more()

    def sees(self, *marks: str) -> Reading[str]:
        """The first of these marks that comes next; empty if none does."""
        while True:
            rest = self._text[self._at : self._at + _LOOK_AHEAD]
            is_open = False
            for mark in marks:
                if rest.startswith(mark):
                    return mark
                if not self.is_final and mark.startswith(rest):
                    is_open = True
                    break  # a mark named earlier goes first
            if not is_open:
                return ""
            yield from self.more()

    def accepts(self, *marks: str) -> Reading[str]:
        """Read one of these marks, if it comes next; it, or an empty text."""
        mark = yield from self.sees(*marks)
        self._at += len(mark)
        return mark

    def expects(self, *marks: str) -> Reading[str]:
        """Read one of these marks.

        Raises:
            NoCallError: if something else comes next.
            EndOfTextError: if the text ends before or within the mark.
        """
        mark = yield from self.accepts(*marks)
        if not mark:
            if self.ends_within(*marks):
                raise EndOfTextError
            raise NoCallError
        return mark

    def ends_within(self, *marks: str) -> bool:
        """Whether the text has ended, with nothing or the beginning of one of these marks."""
        return self.is_final and any(mark.startswith(self.rest) for mark in marks)

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read as much as the pattern matches here; it must match any beginning of a match."""
        while True:
            found = pattern.match(self._text, self._at)
            end = self._at if found is None else found.end()
            if end < len(self._text) or self.is_final:
                return self.take(end - self._at)
            yield from self.more()

    def until(
        self,
        *marks: str,
        then: tuple[str, ...] = (),
        free: str = "",
        each: Callable[[str], None] | None = None,
    ) -> Reading[tuple[str, str]]:
        """Read up to the first of these marks, and over it.

        Args:
            marks: the earliest in the text counts, of two at one place the one named first.
            then: if given, a mark counts only if one of these comes behind it and white space, or nothing.
            free: one more mark, which counts whatever follows.
            each: gets the text in pieces as it comes; then the text returned is empty.

        Raises:
            EndOfTextError: if no mark comes; `each` has got all text by then.
        """
        kept: list[str] = []
        write = kept.append if each is None else each
        marks = (*marks, free) if free else marks
        start = self._at
        while True:
            places = [(place, i, mark) for i, mark in enumerate(marks) if (place := self._text.find(mark, start)) >= 0]
            end = len(self._text)
            if places:
                end, _, mark = min(places)
                is_end = mark == free or self._is_followed(end + len(mark), then)
                if is_end is False:
                    start = end + 1
                    continue
                if is_end:
                    self._pass_on(end, write)
                    self._at += len(mark)
                    if not self.is_in_call and self.num_unsettled > MAX_UNDECIDED:
                        raise NoCallError
                    return "".join(kept), mark
            elif not self.is_final or self.is_in_call:  # half a mark at the end of a call is none of its text
                end -= held_suffix(self._text[start:], marks)
            self._pass_on(end, write)
            start = end + self._num_dropped
            yield from self.more()
            start -= self._num_dropped

    def close(self, end: str, *starts: str) -> Reading[None]:
        """Read what stands between the last call and the end mark: it is no content, unless that mark never comes.

        One of `starts`, with which another block begins, ends it, too.
        """
        try:
            _, found = yield from self.until(end, *starts)
        except EndOfTextError:
            self.rewind()
            if end.startswith(self.rest.strip()):
                self._at = len(self._text)
            return
        if found != end:
            self._at -= len(found)

    def _pass_on(self, end: int, write: Callable[[str], None]) -> None:
        if end > self._at:
            write(self.take(end - self._at))

    def _is_followed(self, place: int, then: tuple[str, ...]) -> bool | None:
        """Whether one of `then` comes there; None if it is not certain yet."""
        if not then:
            return True
        rest = self._text[place : place + _LOOK_AHEAD].lstrip()
        if any(rest.startswith(mark) for mark in then):
            return True
        if any(mark.startswith(rest) for mark in then):
            return True if self.is_final else None
        return False

    # --- writing ----------------------------------------------------------------------------

    def settle(self) -> None:
        """What was read is understood.

        Raises:
            NoCallError: if that took too long.
        """
        if not self.is_in_call and self.num_unsettled > MAX_UNDECIDED + 1:
            raise NoCallError
        self._settled = self._at

    def start_call(self, name: str, call_id: str = "") -> None:
        """A call begins."""
        self.settle()
        self._flush()
        self.is_in_call = self.has_calls = True
        self.num_calls += 1
        if self._is_counted:
            self._parts.append(CallStart(self.num_calls - 1, call_id or self._make_id(), name))

    def say(self, part: Part) -> None:
        """Something that is no call, in formats whose blocks hold such."""
        self._flush()
        self._settled = self._at
        self._parts.append(part)

    def add(self, text: str) -> None:
        """More of the call's arguments, as JSON text; what was read so far is settled."""
        self._settled = self._at
        if text and self._is_counted:
            self._arguments.append(text)

    def end_call(self) -> None:
        """The call is whole."""
        self.settle()
        self.is_in_call = False

    def rewind(self) -> None:
        """Back to what was settled last."""
        self._at = self._settled

    @property
    def _is_counted(self) -> bool:
        return self._parallel or self.num_calls == 1

    def _flush(self) -> None:
        if self._arguments:
            self._parts.append(CallArguments(self.num_calls - 1, "".join(self._arguments)))
            self._arguments = []
