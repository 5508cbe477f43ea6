"""MiniMax M2 and DeepSeek V3.2: `invoke` tags with `parameter` tags, which have their names in attributes."""

import re
from typing import ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.rules import NEW_LINE, Function, Rules, quoted, sequence
from penstock.frontend.parsing.calls.values import ArgumentWriter, arguments_rule, kinds_of

_NAME = re.compile(r'[^"\n<>]{0,256}')


class MiniMaxM2(ToolFormat):
    """One block has all calls. Values are plain text, typed by the tool's schema."""

    name = "minimax_m2"
    models: ClassVar[tuple[str, ...]] = ("MiniMax M2", "MiniMax M2.1", "MiniMax M2.5")
    example = (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    )
    starts: tuple[str, ...] = ("<minimax:tool_call>",)
    prefix: ClassVar[str] = ""
    """The beginning of every tag's name within a block."""

    def __init__(self) -> None:
        self.marks = (*self.starts, *("</" + start[1:] for start in self.starts))
        self._invoke, self._invoke_end = f'<{self.prefix}invoke name="', f"</{self.prefix}invoke>"
        self._parameter, self._parameter_end = f'<{self.prefix}parameter name="', f"</{self.prefix}parameter>"

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        end = "</" + mark[1:]
        while True:
            yield from block.skip()
            if not (yield from block.accepts(self._invoke)):
                break
            name = yield from block.word(_NAME)
            if not name or not (yield from block.accepts('">')):
                raise NoCallError
            block.start_call(name)
            arguments = ArgumentWriter(block, schemas.get(name))
            while True:
                yield from block.skip()
                if (yield from block.accepts(self._invoke_end)) or (yield from block.sees(end)):
                    break
                yield from block.expects(self._parameter)
                yield from self._read_parameter(block, arguments, schemas.get(name), end)
            arguments.close()
        if not block.has_calls:
            raise NoCallError
        yield from block.close(end, mark)

    def _read_parameter(self, block: Block, arguments: ArgumentWriter, schema: object, end: str) -> Reading[None]:
        key = yield from block.word(_NAME)
        yield from block.expects('"')
        attributes, _ = yield from block.until(">")
        kinds = None
        if 'string="true"' in attributes:
            kinds = frozenset({"string"})
        elif 'string="false"' in attributes:
            kinds = kinds_of(schema, key, block.kinds) - {"string"}
        yield from arguments.value(key, self._parameter_end, then=(self._parameter, self._invoke_end, end), kinds=kinds)

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        rules.inner = self.prefix
        calls = self.any_call_rule(rules, functions)
        end = "</" + self.starts[0][1:]
        return f"{NEW_LINE} {calls}{'+' if parallel else ''} {rules.mark(end)}"

    def call_rule(self, rules: Rules, function: Function) -> str:
        opening = rules.mark(f'{self._invoke}{function.name}">\n')
        parameter, end = rules.mark(self._parameter), self._parameter_end
        arguments = arguments_rule(rules, function.arguments, parameter, self._key_end, end, "\n")
        return sequence(opening, arguments, rules.mark(f"{self._invoke_end}\n"))

    def _key_end(self, kinds: frozenset[str] | None) -> str:
        """The grammar of the text between a key and its value, by the value's kinds; None for any."""
        return quoted('">')


class DeepSeekV32(MiniMaxM2):
    """Tags are marked as DSML, and an attribute says whether a value is a string."""

    name = "deepseek_v32"
    models: ClassVar[tuple[str, ...]] = ("DeepSeek V3.2", "DeepSeek V4")
    example = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    )
    taught_by = ("｜DSML｜",)
    starts = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    prefix = "｜DSML｜"

    def __init__(self) -> None:
        super().__init__()
        self.marks = (self.prefix,)  # a token of its own within the tags

    def start_rule(self, rules: Rules) -> str:
        return rules.marks(self.starts[0], self.prefix)

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        if rules.tokenizer.token_id(self.prefix) is None:
            return super().text_rule(rules, functions, parallel=parallel)
        text = f'({rules.terminal("/[^<]+/")} | "<")*'
        block = self.block_rule(rules, functions, parallel=parallel)
        return f"{text} ({self.start_rule(rules)} {block} {text}){'*' if parallel else '?'}"

    def _key_end(self, kinds: frozenset[str] | None) -> str:
        if kinds and (kinds == {"string"} or "string" not in kinds):
            return quoted(f'" string="{"true" if "string" in kinds else "false"}">')
        return sequence(quoted('" string="'), '("true" | "false")', quoted('">'))
