"""The text of a block of calls, read from the front by a generator that waits at `yield` for more text.

A format's reader asks for what it needs (`yield from block.until("</tool_call>")`), and writes what it finds
(`start_call`, `add`). No answer depends on how the text was cut into pieces: each one waits until it is certain, or
until the text has ended.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from penstock.frontend.parsing.parts import CallArguments, CallStart, Part, held_suffix

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads some of a block; yields when it needs more text."""

Kinds = dict[tuple[int, int], set[str]]
"""The JSON types of schemas that were looked at, by id and depth: a small one may refer to itself very often."""

MAX_UNDECIDED = 32768
"""After this many characters without a call's name, a block is taken for text."""

_LOOK_AHEAD = 1024
"""More characters than any reader looks ahead."""

SPACE = " \t\r\n"


class NoCallError(Exception):
    """The text that was taken for a call is not one."""


class EndOfTextError(Exception):
    """The text ended before what the reader was waiting for."""


class Block:
    """The text from a block's opening on, and the calls found in it."""

    def __init__(
        self,
        names: frozenset[str],
        make_id: Callable[[], str],
        *,
        parallel: bool,
        num_calls: int,
        kinds: Kinds | None = None,
    ) -> None:
        """`names` are the offered tools' names; without `parallel` only the output's first call counts.

        `kinds`: what is known of the schemas, kept for later blocks.
        """
        self.names = names
        self.kinds: Kinds = {} if kinds is None else kinds
        self.num_calls = num_calls
        self.is_final = False
        self.is_in_call = False
        self.has_calls = False
        """Whether calls were found in this block."""
        self._make_id = make_id
        self._parallel = parallel
        self._text = ""
        self._at = 0  # the text before this place was read
        self._settled = 0  # the text before this place is understood, and never given back
        self._num_dropped = 0  # characters dropped from the front of the text
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
        """The parts found since the last call of this method."""
        if self._arguments:
            self._flush()
        if not self._parts:
            return []
        parts, self._parts = self._parts, []
        return parts

    @property
    def rest(self) -> str:
        """The text that was not read."""
        return self._text[self._at :]

    @property
    def unsettled(self) -> str:
        """The text that was not read, or read but not understood."""
        return self._text[self._settled :]

    @property
    def num_unsettled(self) -> int:
        """Characters that were read but not understood."""
        return self._at - self._settled

    # --- reading ----------------------------------------------------------------------------

    def more(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            EndOfTextError: if no more comes.
            NoCallError: if the block is too long already without a call's name.
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
        """Read characters that have come already."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        return text

    def pass_over(self, count: int) -> None:
        """Read over characters that have come already and are known."""
        self._at += count

    def back(self, count: int) -> None:
        """Give back the characters that were read last."""
        self._at -= count

    def skip(self, characters: str = SPACE) -> Reading[None]:
        """Read over these characters, up to a different one or the end of the text."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in characters:
                    return
                self._at += 1
            if self.is_final:
                return
            yield from self.more()

    def sees(self, *marks: str) -> Reading[str]:
        """Which of these marks comes next; empty if none does."""
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
        """Read one of these marks if it comes next; return it, or an empty text."""
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
        """Whether the text has ended, and its rest is empty or the beginning of one of these marks."""
        return self.is_final and any(mark.startswith(self.rest) for mark in marks)

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read as much as the pattern matches here. The pattern must match every beginning of a match, too."""
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
            marks: the earliest in the text counts; of two at the same place, the one named first.
            then: if given, a mark counts only if white space and one of these, or the end of the text, follow.
            free: one more mark, which counts whatever follows.
            each: called with the text in pieces as it comes; the returned text is then empty.

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
                begun = len(self._text) - held_suffix(self._text[start:], marks)
                if is_end and not self.is_final and begun < end:  # another may have begun earlier
                    is_end, end = None, begun
                if is_end is False:
                    start = end + 1
                    continue
                if is_end:
                    self._pass_on(end, write)
                    self._at += len(mark)
                    if not self.is_in_call and self.num_unsettled > MAX_UNDECIDED:
                        raise NoCallError
                    return "".join(kept), mark
            elif not self.is_final or self.is_in_call:  # half a mark at the end of a call is not part of its text
                end -= held_suffix(self._text[start:], marks)
            self._pass_on(end, write)
            start = end + self._num_dropped
            yield from self.more()
            start -= self._num_dropped

    def close(self, end: str, *starts: str) -> Reading[None]:
        """Read the text between the last call and the end mark: it is not content, unless that mark never comes.

        A mark of `starts`, which begins another block, ends it too.
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
        """Whether one of `then` follows at that place; None if that is not certain yet."""
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
        """Mark everything that was read as understood.

        Raises:
            NoCallError: if too much was read before it was understood.
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
        """Write a part that is not a call, for formats whose blocks contain such parts."""
        self._flush()
        self._settled = self._at
        self._parts.append(part)

    def add(self, text: str) -> None:
        """Write more of the call's arguments, as JSON text; settles what was read so far."""
        self._settled = self._at
        if text and self._is_counted:
            self._arguments.append(text)

    def end_call(self) -> None:
        """The call is complete."""
        self.settle()
        self.is_in_call = False

    def rewind(self) -> None:
        """Go back to the last settled place."""
        self._at = self._settled

    @property
    def _is_counted(self) -> bool:
        return self._parallel or self.num_calls == 1

    def _flush(self) -> None:
        if self._arguments:
            self._parts.append(CallArguments(self.num_calls - 1, "".join(self._arguments)))
            self._arguments = []
