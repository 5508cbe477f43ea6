"""Finds the tool calls in a model's text, whatever pieces it comes in.

    TEXT --a mark, or an opening at the start of a line--> BLOCK, read by the format --> TEXT
      ^                                                      |
      `------- it was not a call: its text is content -------'

Text is held back until it is certain what it is: a mark that may yet be completed, a block whose call is not known yet,
white space that may precede a call. So the result is the same whether a text is fed in pieces or at once, and complete
answers are parsed by the same state machine.
"""

import re

from penstock.frontend.parsing.calls.block import SPACE, Block, EndOfTextError, Kinds, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.parts import Content, Part, held_suffix


class ToolCallParser:
    """Turns one sequence's text into content and calls. Call `feed` with the text, then `finish`."""

    def __init__(
        self,
        tool_format: ToolFormat,
        schemas: Schemas,
        *,
        parallel: bool = True,
        is_open: bool = False,
        kinds: Kinds | None = None,
    ) -> None:
        """`schemas` has the offered tools; without `parallel` only the first call counts.

        `is_open`: the prompt ended with the mark that opens a block. `kinds`: what is known of the schemas.
        """
        self._kinds: Kinds = {} if kinds is None else kinds
        self._format = tool_format
        self._schemas = schemas
        self._names = frozenset(schemas)
        self._parallel = parallel
        self._buffer = ""
        self._parts: list[Part] = []
        self._is_final = False
        self._space = ""  # held back: dropped if a call follows
        self._is_line_start = True
        self._follows_call = False
        self._block: Block | None = None
        self._reading: Reading[None] | None = None
        self._opening = ""  # the mark or character that opened the block
        self._is_bare = False  # it was a character
        openings = re.escape(tool_format.opening)
        self._bare_here = re.compile(rf"[ \t\r\n]*[{openings}]") if openings else None
        self._bare_later = re.compile(rf"\n[ \t\r]*[{openings}]") if openings else None
        self.num_calls = 0
        if is_open:
            self._open(tool_format.starts[0], shown="")

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of text; return what is certain now."""
        if self._block is None:
            self._buffer += text
        else:
            self._block.feed(text)
        return self._run()

    def finish(self) -> list[Part]:
        """End the text; return what was held back."""
        self._is_final = True
        if self._block is not None:
            self._block.is_final = True
        parts = self._run()
        if self._space and not self.num_calls:
            parts.append(Content(self._space))
        self._space = ""
        return parts

    def _run(self) -> list[Part]:
        while self._in_text() if self._block is None else self._in_block(self._block):
            pass
        parts, self._parts = self._parts, []
        return parts

    # --- text -------------------------------------------------------------------------------

    def _in_text(self) -> bool:
        """Show text up to the next block; return whether there is one."""
        if not self._buffer:
            return False
        starts = self._format.starts
        mark_at, mark = self._next_mark()
        bare_at = self._next_bare(mark_at)
        if bare_at >= 0:
            held = held_suffix(self._buffer[bare_at:], starts)
            self._show(self._take(bare_at))
            if held == len(self._buffer) and not self._is_final:
                return False  # '[' may begin a mark
            self._open("")
            return True
        if mark:
            self._show(self._take(mark_at))
            self._take(len(mark))
            self._open(mark)
            return True
        held = 0 if self._is_final else held_suffix(self._buffer, starts)
        self._show(self._take(len(self._buffer) - held))
        return False

    def _next_mark(self) -> tuple[int, str]:
        found = [
            (at, -len(mark), mark) for mark in self._format.starts if (at := self._buffer.find(mark)) >= 0
        ]  # of two marks at the same place, the longer one
        at, _, mark = min(found, default=(len(self._buffer), 0, ""))
        return at, mark

    def _next_bare(self, before: int) -> int:
        """Where a block without a mark opens at the start of a line, before the next mark; -1: nowhere."""
        if self._bare_here is None or self._bare_later is None:
            return -1
        found = self._bare_here.match(self._buffer) if self._is_line_start else None
        found = found or self._bare_later.search(self._buffer)
        return found.end() - 1 if found is not None and found.end() - 1 < before else -1

    def _show(self, text: str) -> None:
        """Show content, without white space next to calls."""
        if not text:
            return
        line = text[text.rfind("\n") + 1 :]
        self._is_line_start = not line.strip(SPACE) and (self._is_line_start or len(line) < len(text))
        text = self._space + text
        if self._follows_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._follows_call = False
            self._parts.append(Content(shown))

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    # --- a block of calls -------------------------------------------------------------------

    def _open(self, mark: str, shown: str | None = None) -> None:
        block = Block(
            self._names, self._format.make_id, parallel=self._parallel, num_calls=self.num_calls, kinds=self._kinds
        )
        block.feed(self._buffer)
        block.is_final = self._is_final
        self._opening = (mark or self._buffer[0]) if shown is None else shown
        self._is_bare = not mark
        self._buffer = ""
        self._block, self._reading = block, self._format.read(block, mark, self._schemas)

    def _in_block(self, block: Block) -> bool:
        """Let the format read on; return whether the block has ended."""
        assert self._reading is not None
        is_whole = False
        try:
            next(self._reading)
        except StopIteration:
            is_whole, rest = True, block.rest
        except NoCallError:
            rest = block.unsettled
        except EndOfTextError:
            rest = "" if block.num_calls else block.unsettled  # the text ends after a call, or within one
            is_whole = bool(block.num_calls)
        else:
            self._found(block)
            return False
        self._found(block)
        self._block = self._reading = None
        if is_whole or block.has_calls:
            self._buffer = rest
            self._follows_call = self._is_line_start = True
            return True
        self._show(self._opening)
        self._buffer = rest[1:] if self._is_bare else rest
        self._is_line_start = False
        return True

    def _found(self, block: Block) -> None:
        self.num_calls = block.num_calls
        parts = block.parts()
        if parts:
            self._space = ""
            self._parts += parts
