"""Kimi K3: elements whose tags are made of tokens; each argument names its type."""

import re
from contextlib import suppress

from penstock.frontend.parsing.calls.block import Block, EndOfTextError, NoCallError, Reading
from penstock.frontend.parsing.calls.format import Schemas, ToolFormat
from penstock.frontend.parsing.calls.json_calls import read_arguments
from penstock.frontend.parsing.calls.rules import Function, Rules, quoted, repeated, sequence
from penstock.frontend.parsing.calls.values import ArgumentWriter, arguments_rule, kinds_of

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_TOOLS, _TOOLS_END = f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"
_CALL, _CALL_END = f'{_OPEN}call tool="', f"{_CLOSE}call{_SEP}"
_ARGUMENT, _ARGUMENT_END = f'{_OPEN}argument key="', f"{_CLOSE}argument{_SEP}"
_JSON, _JSON_END = f"{_OPEN}json", f"{_CLOSE}json{_SEP}"
_MESSAGE_END = f"{_CLOSE}message{_SEP}"
_ANSWER, _ANSWER_END = f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}"
_NAME = re.compile(r'[^"\n<>]{0,256}')
_KINDS = ("string", "number", "boolean", "object", "array", "null")


class KimiK3(ToolFormat):
    """One block has all calls."""

    name = "kimi_k3"
    models = ("Kimi K3",)
    example = (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    taught_by = ((_OPEN, _SEP, _CLOSE, "argument"),)
    starts = (_TOOLS,)
    marks = (_OPEN, _CLOSE, _SEP)

    def read(self, block: Block, mark: str, schemas: Schemas) -> Reading[None]:
        while True:
            yield from block.skip()
            if not (yield from block.accepts(_CALL)):
                break
            name = yield from block.word(_NAME)
            attributes, _ = yield from block.until(_SEP)
            if not name or not attributes.startswith('"'):
                raise NoCallError
            yield from self._read_arguments(block, name, schemas)
        if not block.has_calls:
            raise NoCallError
        yield from block.close(_TOOLS_END, _TOOLS)
        with suppress(EndOfTextError):
            yield from block.accepts(_MESSAGE_END)

    def _read_arguments(self, block: Block, name: str, schemas: Schemas) -> Reading[None]:
        if (yield from block.accepts(_JSON)):
            yield from block.until(_SEP)
            yield from read_arguments(block, name)
            yield from block.close(_JSON_END, _CALL_END)
            yield from block.close(_CALL_END, _CALL)
            return
        block.start_call(name)
        schema = schemas.get(name)
        arguments = ArgumentWriter(block, schema)
        while True:
            yield from block.skip()
            if not (yield from block.accepts(_ARGUMENT)):
                if block.ends_within(_ARGUMENT, _CALL_END):
                    raise EndOfTextError
                break
            key = yield from block.word(_NAME)
            attributes, _ = yield from block.until(_SEP)
            kinds = kinds_of(schema, key, block.kinds) - {"string"}
            if 'type="string"' in attributes:
                kinds = frozenset({"string"})
            yield from arguments.value(key, _ARGUMENT_END, then=(_ARGUMENT, _CALL_END), kinds=kinds)
        arguments.close()
        yield from block.close(_CALL_END, _CALL, _TOOLS_END)

    def start_rule(self, rules: Rules) -> str:
        return rules.marks(_TOOLS, *self.marks)

    @property
    def text_ends(self) -> tuple[str, ...]:
        return self.marks[:1]

    def calls_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        calls = super().calls_rule(rules, functions, parallel=parallel)
        return sequence(f"({rules.marks(_ANSWER + _ANSWER_END, *self.marks)})?", calls)

    def text_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        """The grammar of an answer, whose first mark may be in the prompt, and of calls behind it."""
        if rules.tokenizer.token_id(_OPEN) is None:
            return super().text_rule(rules, functions, parallel=parallel)
        before, behind = (f"({rules.marks(mark, *self.marks)})?" for mark in (_ANSWER, _ANSWER_END))
        calls = sequence(self.start_rule(rules), self.block_rule(rules, functions, parallel=parallel))
        end = rules.marks(_MESSAGE_END, *self.marks)
        return sequence(before, f"{rules.text_without(_OPEN, _CLOSE)}?", behind, f"({calls} | {end})?")

    def block_rule(self, rules: Rules, functions: list[Function], *, parallel: bool) -> str:
        call = sequence(
            rules.marks(_CALL, _OPEN), self.any_call_rule(rules, functions), rules.marks(_CALL_END, *self.marks)
        )
        message_end = f"({rules.marks(_MESSAGE_END, *self.marks)})?"
        return sequence(repeated(call, "", parallel=parallel), rules.marks(_TOOLS_END, *self.marks), message_end)

    def call_rule(self, rules: Rules, function: Function) -> str:
        rules.inner = _CLOSE
        arguments = arguments_rule(
            rules,
            function.arguments,
            rules.marks(_ARGUMENT, _OPEN),
            lambda kinds: self._key_end(rules, kinds),
            _CLOSE,
            "argument",
            then_mark=_SEP,
        )
        return sequence(quoted(f'{function.name}" index="'), "/[0-9]+/", quoted('"'), rules.mark(_SEP), arguments)

    def _key_end(self, rules: Rules, kinds: frozenset[str] | None) -> str:
        """The grammar of the text between a key and its value, by the value's kinds; None for any."""
        known = _KINDS if not kinds else sorted({"number" if kind == "integer" else kind for kind in kinds})
        return sequence(quoted('" type="'), f"({' | '.join(map(quoted, known))})", quoted('"'), rules.mark(_SEP))
