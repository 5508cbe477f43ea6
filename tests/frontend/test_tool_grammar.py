"""The grammars of tool calls: what the model may write, for each format, with and without tokens for the marks."""

from pathlib import Path
from typing import Any

import pytest

from penstock.core.config.grammar import grammar_vocabulary, make_matcher
from penstock.frontend.grammar_child import read_grammar
from penstock.frontend.reasoning import REASONING_FORMATS
from penstock.frontend.schema import ChatRequest
from penstock.frontend.tokenizer import load_tokenizer
from penstock.frontend.tool_formats import GENERIC, HERMES, LLAMA3_JSON, MISTRAL, TOOL_FORMATS, ToolFormat
from penstock.frontend.tool_grammar import with_calls
from penstock.frontend.validate import Rules, SamplingDefaults, ValidRequest, validate_common
from penstock.frontend.validate_tools import ValidTools
from tests.frontend.checkpoint_folder import byte_level_tokenizer, write_checkpoint

THINK = REASONING_FORMATS["think"]
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}},
    "required": ["x"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/Point"}},
    "required": ["p"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}
GOOD = '{"p": {"x": 3, "next": {"x": 4, "next": null}}}'
BAD = '{"p": {"x": "3"}}'


class Model:
    """A checkpoint's tokens, with or without tokens of their own for marks."""

    def __init__(self, folder: Path, marks: list[str], *, special: bool) -> None:
        tokenizer = byte_level_tokenizer()
        if special:
            tokenizer.add_special_tokens(marks)
        else:
            tokenizer.add_tokens(marks)
        write_checkpoint(folder, tokenizer=tokenizer)
        self.tokenizer = load_tokenizer(folder)
        self._vocabulary = grammar_vocabulary(folder)

    def takes(self, tools: ValidTools, text: str) -> bool:
        """Whether the model may write this text, and end with it."""
        common = with_calls(request(), tools, self.tokenizer, THINK)
        assert common.grammar is not None
        grammar = read_grammar(self._vocabulary, common.grammar.kind, common.grammar.text)
        matcher = make_matcher(self._vocabulary, grammar)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        taken: int = matcher.try_consume_tokens(token_ids)
        assert not matcher.is_error(), matcher.get_error()
        return taken == len(token_ids) and bool(matcher.is_accepting())


def request() -> ValidRequest:
    rules = Rules(("m",), 1, 512, 384, (2,), SamplingDefaults())
    return validate_common(ChatRequest(), rules, max_tokens=None)


def tools_for(tool_format: ToolFormat, *, forced: bool, parallel: bool = True, strict: bool = True) -> ValidTools:
    function = {"name": "f", "parameters": PARAMETERS, "strict": strict}
    other = {"type": "function", "function": {"name": "g"}}
    tools = [{"type": "function", "function": function}, other]
    return ValidTools(tools, frozenset({"f", "g"}), parallel, tool_format, is_forced=forced)


def written(tool_format: ToolFormat, *arguments: str) -> str:
    """Calls of `f` as the format writes them."""
    key = "parameters" if tool_format is LLAMA3_JSON else "arguments"
    calls = [f'{{"name": "f", "{key}": {text}}}' for text in arguments]
    if tool_format is MISTRAL:
        return "[TOOL_CALLS][" + ", ".join(calls) + "]"
    if tool_format is HERMES:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return ("; " if tool_format is LLAMA3_JSON else "\n").join(calls)


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>"]


@pytest.fixture(scope="module", params=["special", "tokens", "text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    marks = [] if request.param == "text" else MARKS
    return Model(tmp_path_factory.mktemp("model"), marks, special=request.param == "special")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_calls(model: Model, name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    forced = tools_for(tool_format, forced=True)
    assert model.takes(forced, written(tool_format, GOOD))
    assert model.takes(forced, written(tool_format, GOOD, GOOD))
    assert not model.takes(forced, written(tool_format, BAD))
    assert not model.takes(forced, "")
    assert not model.takes(forced, "Hello")
    single = tools_for(tool_format, forced=True, parallel=False)
    assert model.takes(single, written(tool_format, GOOD))
    assert not model.takes(single, written(tool_format, GOOD, GOOD))


@pytest.mark.parametrize("tool_format", [HERMES, MISTRAL], ids=lambda tool_format: tool_format.name)
def test_free_calls_of_strict_tools(model: Model, tool_format: ToolFormat) -> None:
    tools = tools_for(tool_format, forced=False)
    good, bad = written(tool_format, GOOD), written(tool_format, BAD)
    for text in ("", "Hello <b>, {there}\n[1]", good, f"I look.\n{good}", f"{good}\nDone.", f"{good} and {good}"):
        assert model.takes(tools, text), text
        assert model.takes(tools, "<think>\nHm.\n</think>\n\n" + text), text
    for text in (bad, f"I look.\n{bad}", f"<think>Hm.</think>{good}{bad}"):
        assert not model.takes(tools, text), text
    single = tools_for(tool_format, forced=False, parallel=False)
    assert model.takes(single, f"I look. {good} Done.")
    assert not model.takes(single, f"{good} and {good}")


def test_tools_that_are_not_strict_bring_no_grammar(model: Model) -> None:
    common = request()
    assert with_calls(common, tools_for(HERMES, forced=False, strict=False), model.tokenizer, None) is common
    assert with_calls(common, None, model.tokenizer, None) is common
    assert with_calls(common, tools_for(GENERIC, forced=True, strict=False), model.tokenizer, None).grammar is not None
