"""Finds the tool calls in a model's text, whatever the borders of the pieces that it comes in.

    TEXT --mark, or '{' at the start of a line--> BLOCK --the object ends--> AFTER --end mark--> TEXT
      ^                                             |
      `------- it was no call: its text, after all -'

Nothing is shown before it is certain what it is: a mark that may yet be completed, an object whose name
is not known, white space that may stand before a call. So feeding a text in pieces gives what feeding it
at once gives; whole answers are parsed by this very machine.
"""

import re
from collections.abc import Callable

from penstock.frontend.call_json import CallReader
from penstock.frontend.message_parts import CallArguments, CallStart, Content, Part, held_suffix
from penstock.frontend.tool_formats import ToolFormat

MAX_UNDECIDED = 32768
"""Characters after which an object that shows no name is taken for text."""

_SPACE = " \t\r\n"
_OPENING = re.compile(r"[ \t\r\n]*[{\[]")
_NEXT_LINE_OPENING = re.compile(r"\n[ \t\r]*[{\[]")
_NAME = re.compile(r"[A-Za-z0-9_.\-]{0,256}")
_AFTER_NAME = ("[ARGS]", "[CALL_ID]")


class ToolCallParser:
    """One sequence's text to content and calls. Feed it, then `finish` it."""

    def __init__(self, tool_format: ToolFormat, names: frozenset[str], *, parallel: bool = True) -> None:
        """`names` are those of the offered tools; without `parallel` only the first call counts."""
        self._format = tool_format
        self._names = names
        self._parallel = parallel
        self._buffer = ""
        self._step: Callable[[], bool] = self._in_text
        self._parts: list[Part] = []
        self._is_final = False
        self._space = ""  # held back: dropped if a call follows
        self._is_line_start = True
        self._follows_call = False
        self._eats_separator = False
        self._mark = ""
        self._undecided = ""  # what was taken since the block or its last call began
        self._in_array = False
        self._block_has_call = False
        self._call = CallReader()
        self._has_started = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of text; return what is certain now."""
        self._buffer += text
        return self._run()

    def finish(self) -> list[Part]:
        """No more text comes; return what was held back."""
        self._is_final = True
        parts = self._run()
        if self._space and not self.num_calls:
            parts.append(Content(self._space))
        self._space = ""
        return parts

    def _run(self) -> list[Part]:
        while self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    # --- text -------------------------------------------------------------------------------

    def _in_text(self) -> bool:
        if self._eats_separator and not self._skip_separator():
            return False
        if not self._buffer:
            return False
        mark_at, mark = self._next_mark()
        bare_at = self._next_bare(mark_at)
        if bare_at >= 0:
            held = held_suffix(self._buffer[bare_at:], self._format.starts)
            if bare_at + held == len(self._buffer) and held and not self._is_final:
                self._show(self._take(bare_at))
                return False  # '[' may begin a mark
            self._show(self._take(bare_at))
            self._open("")
            return True
        if mark:
            self._show(self._take(mark_at))
            self._buffer = self._buffer[len(mark) :]
            self._open(mark)
            return True
        held = 0 if self._is_final else held_suffix(self._buffer, self._format.starts)
        self._show(self._take(len(self._buffer) - held))
        return False

    def _next_mark(self) -> tuple[int, str]:
        found = [(at, mark) for mark in self._format.starts if (at := self._buffer.find(mark)) >= 0]
        return min(found, default=(len(self._buffer), ""))

    def _next_bare(self, before: int) -> int:
        """Where an object at the start of a line begins, ahead of the next mark; -1 for nowhere."""
        if not self._format.bare:
            return -1
        found = _OPENING.match(self._buffer) if self._is_line_start else None
        found = found or _NEXT_LINE_OPENING.search(self._buffer)
        return found.end() - 1 if found is not None and found.end() - 1 < before else -1

    def _skip_separator(self) -> bool:
        """Between bare calls may stand a ';' or ','; False if it is not yet certain."""
        self._buffer = self._buffer.lstrip()
        if self._buffer[:1] in (";", ",", ""):
            rest = self._buffer[1:].lstrip()
            if not rest and not self._is_final:
                return False
            if rest.startswith("{"):
                self._buffer = rest
        self._eats_separator = False
        return True

    def _show(self, text: str) -> None:
        """Content, without white space beside calls."""
        if not text:
            return
        line = text[text.rfind("\n") + 1 :]
        self._is_line_start = not line.strip(_SPACE) and (self._is_line_start or len(line) < len(text))
        text = self._space + text
        if self._follows_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._follows_call = False
            self._parts.append(Content(shown))

    # --- a block of calls -------------------------------------------------------------------

    def _open(self, mark: str) -> None:
        self._mark = mark
        self._undecided = ""
        self._in_array = self._block_has_call = False
        self._step = self._at_opening

    def _at_opening(self) -> bool:
        """Behind a mark, or at a bare brace: what follows must be an object, an array, or a name."""
        if not self._skip_space():
            return self._is_final and self._give_up()
        first = self._buffer[0]
        if first == "{":
            return self._begin_call()
        if first == "[" and not any(self._buffer.startswith(mark) for mark in self._format.starts):
            self._undecided += self._take(1)
            self._in_array = True
            self._step = self._in_list
            return True
        if self._mark and self._format.named_blocks:
            self._step = self._at_name
            return True
        return self._give_up()

    def _in_list(self) -> bool:
        if not self._skip_space(","):
            return self._is_final and self._give_up()
        if self._buffer[0] == "{":
            return self._begin_call()
        if self._buffer[0] == "]" and self._block_has_call:
            self._take(1)
            return self._end_value()
        return self._give_up()

    def _begin_call(self) -> bool:
        self._call = CallReader(None if self._mark else self._names)
        self._has_started = False
        self._step = self._in_call
        return True

    def _in_call(self) -> bool:
        if not self._buffer:
            return self._is_final and self._cut_off()
        taken, arguments = self._call.feed(self._buffer[: MAX_UNDECIDED + 1 - len(self._undecided)])
        text = self._take(taken)
        if self._call.is_committed and not self._has_started:
            self._start_call(self._call.name)
        if not self._has_started:
            self._undecided += text
            if self._call.has_failed or len(self._undecided) > MAX_UNDECIDED:
                return self._give_up()
            return bool(self._buffer) or self._is_final
        self._add_arguments(arguments)
        if self._call.has_failed:
            return self._end_value()
        if self._call.is_done:
            if self._in_array:
                self._step = self._in_list
                return True
            return self._end_value()
        return bool(self._buffer) or self._is_final

    def _at_name(self) -> bool:
        """A name, perhaps [CALL_ID] and an id, perhaps [ARGS], then the arguments' object."""
        brace = self._buffer.find("{")
        head = self._buffer if brace < 0 else self._buffer[:brace]
        found = _NAME.match(head)
        name = found[0] if found else ""
        rest = head[len(name) :].lstrip()
        is_fine = bool(name) and len(head) < 512
        if rest and not any(rest.startswith(mark) for mark in _AFTER_NAME):
            is_fine = brace < 0 and any(mark.startswith(rest) for mark in _AFTER_NAME)
        if not is_fine or (brace < 0 and self._is_final):
            return self._give_up()
        if brace < 0:
            return False
        self._take(brace)
        self._call = CallReader(name=name)
        self._start_call(name)
        self._step = self._in_call
        return True

    def _start_call(self, name: str) -> None:
        self._has_started = self._block_has_call = True
        self._undecided = ""
        self._space = ""
        self.num_calls += 1
        if self._is_counted:
            self._parts.append(CallStart(self.num_calls - 1, self._format.make_id(), name))

    def _add_arguments(self, text: str) -> None:
        if text and self._is_counted:
            self._parts.append(CallArguments(self.num_calls - 1, text))

    @property
    def _is_counted(self) -> bool:
        return self._parallel or self.num_calls == 1

    def _end_value(self) -> bool:
        """All calls of a block are read."""
        self._undecided = ""
        self._follows_call = True
        self._is_line_start = True
        self._eats_separator = self._format.bare
        self._step = self._before_end if self._format.ends.get(self._mark) else self._in_text
        return True

    def _before_end(self) -> bool:
        """Between a block's last call and its end mark; what stands there is no content."""
        end = self._format.ends[self._mark]
        places = [(at, mark) for mark in (end, self._mark) if (at := self._buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._take(at + (len(end) if mark == end else 0))
            self._step = self._in_text
            return True
        if self._is_final:
            self._step = self._in_text  # it never came: then it was content
            return True
        return False

    def _cut_off(self) -> bool:
        """The output ended within an object."""
        if not self._has_started:
            return self._give_up()
        self._step = self._in_text
        return True

    def _give_up(self) -> bool:
        """What was taken for a call is none: it is text, or, behind a call of the same block, dropped with its rest."""
        self._buffer = self._undecided + self._buffer
        self._undecided = ""
        if self._block_has_call:
            return self._end_value()
        self._step = self._in_text
        opening = self._mark or self._take(1)
        self._show(opening)
        self._is_line_start = False
        return True

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _skip_space(self, more: str = "") -> bool:
        """Drop white space; False if there is nothing behind it yet."""
        rest = self._buffer.lstrip(_SPACE + more)
        self._undecided += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        return bool(rest)
