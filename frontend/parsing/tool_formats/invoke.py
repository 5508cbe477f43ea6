"""MiniMax M2 and M3, DeepSeek V3.2, Muse Glimmer: `invoke` tags with a tag for each parameter."""

import re
from typing import Any, ClassVar

from penstock.frontend.parsing.calls.block import Block, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.rules import NEW_LINE, Function, Rules, quoted, regex, sequence
from penstock.frontend.parsing.calls.values import (
    OF_OBJECTS,
    ArgumentWriter,
    arguments_rule,
    as_json,
    json_text,
    kinds_of,
    property_schema,
    required,
    resolved,
)

_NAME = re.compile(r'[^"\n<>]{0,256}')
_TAG = re.compile(r"[^\s<>/\]]{0,256}")
_MAX_DEPTH = 32


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
    models: ClassVar[tuple[str, ...]] = ("DeepSeek V3.2",)
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


class DeepSeekV4(DeepSeekV32):
    """The block has another name; both are read."""

    name = "deepseek_v4"
    models: ClassVar[tuple[str, ...]] = ("DeepSeek V4",)
    example = DeepSeekV32.example.replace("function_calls", "tool_calls")
    taught_by = ("｜DSML｜tool_calls",)
    starts = ("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>")


class Glimmer(MiniMaxM2):
    """Each call is a message to its tool."""

    name = "glimmer"
    models: ClassVar[tuple[str, ...]] = ("Muse Glimmer",)
    example = (
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    )
    taught_by = (("<atem:function_calls>", "to="),)
    prefix = "atem:"
    separator = ""
    _calls, _calls_end, _message = "<atem:function_calls>", "</atem:function_calls>", "<|message|>"
    _next = "<|eom|><|start|>assistant"

    def __init__(self) -> None:
        super().__init__()
        self.starts = ("to=", f"{self._next} to=")
        self.marks = ("<|eom|>", "<|start|>", "<|message|>")

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        name = yield from block.word(_NAME)
        yield from block.expects(self._message)
        if name == "user":  # text
            block.settle()
            return
        yield from block.expects(self._calls)
        yield from super().read(block, self._calls, schemas)

    def start_rule(self, rules: Rules) -> str:
        return ""

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        return self.any_call_rule(rules, functions)

    def call_rule(self, rules: Rules, function: Function) -> str:
        head = sequence(
            rules.terminal(f"/ ?to={regex(function.name)}/"), rules.mark(self._message), quoted(f"{self._calls}\n")
        )
        return sequence(head, super().call_rule(rules, function), quoted(self._calls_end))

    def calls_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        call = self.block_rule(rules, functions, parallel=parallel)
        more = sequence(rules.marks(self._next, *self.marks), call)
        return f"{call} ({more})*" if parallel else call

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of a message to the user that may be followed by calls, or of calls alone."""
        calls = rules.rule(self.calls_rule(rules, functions, parallel=parallel))
        user = sequence(rules.terminal("/ ?to=user/"), rules.mark(self._message))
        if rules.tokenizer.token_id("<|eom|>") is None:
            following, text = rules.rule(rf"/(.|\n)*{regex(self._next)}/", "[lazy]"), rules.text_without(self._next)
        else:
            text = rules.text_without("<|eom|>")
            following = sequence(f"{text}?", rules.marks(self._next, *self.marks))
        return rules.rule(f"{calls} | {user} ({following} {calls} | {text}?)")


class MiniMaxM3(MiniMaxM2):
    """Every tag begins with a token; arguments are tags of their own names, and lists and objects are nested tags."""

    name = "minimax_m3"
    models: ClassVar[tuple[str, ...]] = ("MiniMax M3",)
    example = (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Oslo]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    )
    taught_by = ("]<]minimax[>[",)
    _token = "]<]minimax[>["
    starts = (f"{_token}<tool_call>",)

    def __init__(self) -> None:
        super().__init__()
        self.marks = (self._token,)
        self._invoke, self._invoke_end = f'{self._token}<invoke name="', f"{self._token}</invoke>"

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        end = f"{self._token}</tool_call>"
        while True:
            yield from block.skip()
            if not (yield from block.accepts(self._invoke)):
                break
            name = yield from block.word(_NAME)
            if not name or not (yield from block.accepts('">')):
                raise NoCallError
            block.start_call(name)
            schema = schemas.get(name)
            arguments = ArgumentWriter(block, schema)
            while True:
                yield from block.skip()
                if (yield from block.accepts(self._invoke_end)) or (yield from block.sees(end)):
                    break
                key = yield from self._read_tag(block)
                arguments.key(key)
                yield from self._read_value(block, arguments, key, schema, schema, 0)
            arguments.close()
        if not block.has_calls:
            raise NoCallError
        yield from block.close(end, mark)

    def _read_tag(self, block: Block) -> Reading[str]:
        yield from block.expects(f"{self._token}<")
        key = yield from block.word(_TAG)
        yield from block.expects(">")
        return key

    def _read_value(
        self, block: Block, arguments: ArgumentWriter, key: str, schema: Any, root: Any, depth: int
    ) -> Reading[None]:
        """Read a value and its closing tag, and write it as JSON; `schema` is that of the object around it."""
        own = resolved(property_schema(schema, key), root)
        kinds = kinds_of(schema, key, block.kinds)
        end = f"{self._token}</{key}>"
        is_nested = not (yield from block.sees(f"{self._token}</")) and bool((yield from block.sees(f"{self._token}<")))
        if is_nested and depth < _MAX_DEPTH:
            yield from self._read_parts(block, arguments, end, own, root, depth)
        elif (yield from block.accepts(end)):
            arguments.raw('""' if "string" in kinds or not kinds & {"array", "object", "null"} else _empty(kinds))
        elif kinds == {"string"}:
            arguments.raw('"')
            yield from block.until(end, each=arguments.string)
            arguments.raw('"')
        else:
            text, _ = yield from block.until(end)
            arguments.raw(as_json(text, kinds))

    def _read_parts(
        self, block: Block, arguments: ArgumentWriter, end: str, own: dict[str, Any], root: Any, depth: int
    ) -> Reading[None]:
        """Read the elements of a list or the members of an object, up to the closing tag around them."""
        is_list: bool | None = None
        while not (yield from block.accepts(end)):
            key = yield from self._read_tag(block)
            if is_list is None:
                is_list = key == "item" and "item" not in (own.get("properties") or {})
                arguments.raw("[" if is_list else "{")
            else:
                arguments.raw(", ")
            if is_list:
                inner = {"properties": {key: own.get("items") or {}}}
            else:
                inner = own
                arguments.raw(json_text(key) + ": ")
            yield from self._read_value(block, arguments, key, inner, root, depth + 1)
            yield from block.skip()
        arguments.raw("]" if is_list else "}")

    def start_rule(self, rules: Rules) -> str:
        return rules.marks(self.starts[0], self._token)

    @property
    def text_ends(self) -> tuple[str, ...]:
        return self.marks

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        calls = self.any_call_rule(rules, functions)
        end = rules.marks(f"{self._token}</tool_call>", self._token)
        return f"{NEW_LINE} {calls}{'+' if parallel else ''} {end}"

    def call_rule(self, rules: Rules, function: Function) -> str:
        opening = rules.marks(f'{self._invoke}{function.name}">', self._token)
        members = self._members_rule(rules, resolved(function.arguments, function.arguments), function.arguments, 0)
        return sequence(opening, members, rules.marks(f"{self._invoke_end}\n", self._token))

    def _members_rule(self, rules: Rules, schema: dict[str, Any], root: Any, depth: int) -> str:
        rules.leave_out(schema, OF_OBJECTS)
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            rules.leave_out_of_open(schema)
            return "" if schema.get("additionalProperties") is False else f"({self._any_rule(rules)})*"
        needed = required(schema)
        parts = []
        for key, part in properties.items():
            rule = sequence(self._tag(rules, f"<{key}>"), self._part_rule(rules, part, key, root, depth + 1))
            parts.append(rule if key in needed else f"({rule})?")
        return " ".join(parts)

    def _part_rule(self, rules: Rules, said: Any, key: str, root: Any, depth: int) -> str:
        """The grammar of a value and its closing tag."""
        reference = said.get("$ref") if isinstance(said, dict) else None
        if isinstance(reference, str):
            target = resolved(said, root)
            return rules.recursive(
                f"{key} {reference}", lambda _: self._part_rule(rules, target, key, root, depth), root
            )
        schema = said if isinstance(said, dict) else {}
        closing = self._tag(rules, f"</{key}>")
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list) and schema[name] and depth < _MAX_DEPTH:
                rules.leave_out(schema, frozenset({name}))
                parts = [self._part_rule(rules, part, key, root, depth + 1) for part in schema[name]]
                return f"({' | '.join(parts)})"
        kinds = kinds_of({"properties": {key: schema}, **_definitions(root)}, key, {})
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            texts = [quoted(choice if isinstance(choice, str) else json_text(choice)) for choice in choices]
            return f"({' | '.join(texts)}) {closing}"
        if depth < _MAX_DEPTH and kinds == {"object"} and schema.get("properties"):
            return sequence(self._members_rule(rules, schema, root, depth), closing)
        if depth < _MAX_DEPTH and kinds == {"array"} and isinstance(schema.get("items"), dict):
            item = sequence(
                self._tag(rules, "<item>"), self._part_rule(rules, schema["items"], "item", root, depth + 1)
            )
            rules.leave_out(schema, OF_OBJECTS | {"items"})
            return f"({item})* {closing}"
        if kinds and not kinds & {"string", "array", "object"}:
            return f"{rules.json({**_definitions(root), **schema}, {})} {closing}"
        rules.leave_out(schema, frozenset({"type"}))
        if rules.tokenizer.token_id(self._token) is None:
            return rules.text_until(f"{self._token}</{key}>")
        return f"{rules.text_without(self._token)}? {closing}"

    def _any_rule(self, rules: Rules) -> str:
        """The grammar of a member of any name, with any value; nothing makes its two tags agree."""
        name, token = "/[A-Za-z0-9_.\\-]+/", rules.mark(self._token)
        if rules.tokenizer.token_id(self._token) is None:
            return f'{token} "<" {name} ">" ' + rules.rule(
                rf"/(.|\n)*{regex(self._token)}<\/[A-Za-z0-9_.\-]+>/", "[lazy]"
            )

        def body(own: str) -> str:
            return f'{token} "<" {name} ">" ({rules.text_without(self._token)}? | {own}+) {token} "</" {name} ">"'

        return rules.recursive("any member", body)

    def _tag(self, rules: Rules, tag: str) -> str:
        return rules.marks(self._token + tag, self._token)


def _empty(kinds: frozenset[str]) -> str:
    return "[]" if "array" in kinds else "{}" if "object" in kinds else "null"


def _definitions(root: Any) -> dict[str, Any]:
    return {name: root[name] for name in ("$defs", "definitions") if isinstance(root, dict) and name in root}
