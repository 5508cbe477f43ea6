"""The grammar of tool calls: of an output that must be calls (`tool_choice` "required" or a named tool), and of one
that may hold calls of strict tools.

Calls are written the way the model's chat template teaches: its marks, then one object (or an array of them)
of a tool's name and of arguments that match the tool's schema. A forced call is not preceded by reasoning;
where calls are free, anything but a mark may stand around them.
"""

import re
from dataclasses import replace
from typing import Any

import msgspec

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.grammars import GrammarSource
from penstock.frontend.reasoning import ReasoningFormat
from penstock.frontend.tokenizer import TextTokenizer
from penstock.frontend.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, ToolFormat
from penstock.frontend.validate import ValidRequest
from penstock.frontend.validate_grammar import MAX_GRAMMAR_BYTES
from penstock.frontend.validate_tools import ValidTools

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def with_calls(
    common: ValidRequest, tools: ValidTools | None, tokenizer: TextTokenizer, reasoning: ReasoningFormat | None
) -> ValidRequest:
    """The request with the grammar of its calls, if it must make some or has strict tools.

    Raises:
        InvalidParameter: if the output must match something else too, cannot end, or the tools are too large.
    """
    if tools is None or not (tools.is_forced or tools.has_strict):
        return common
    field, what = ("tool_choice", "a forced tool_choice") if tools.is_forced else ("tools", "a strict tool")
    if common.grammar is not None:
        raise InvalidParameter(f"{common.grammar.field} and {what} exclude each other", param=field)
    if common.bad_words or common.user_stop_token_ids.issuperset(common.sampling.stop_token_ids):
        raise InvalidParameter(f"{what} excludes ignore_eos and bad_words", param=field)
    num_bytes = len(msgspec.json.encode(_wanted(tools)))
    if num_bytes > MAX_GRAMMAR_BYTES:  # before they are walked
        raise InvalidParameter(
            f"tools that a call is forced of, or that are strict, may have {MAX_GRAMMAR_BYTES} bytes at most, "
            f"got {num_bytes}",
            param="tools",
        )
    try:
        lark = _forced(tools, tokenizer) if tools.is_forced else _free(tools, tokenizer, reasoning)
        text = msgspec.json.encode([lark, _schema(tools)]).decode()
    except RecursionError:
        raise InvalidParameter("tools: a schema is nested too deeply", param="tools") from None
    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(
            f"tools that a call is forced of may have {MAX_GRAMMAR_BYTES} bytes at most", param="tools"
        )
    return replace(common, grammar=GrammarSource("calls", text, field))


def _schema(tools: ValidTools) -> dict[str, Any]:
    """What matches `object`: a call of one of the tools, or an array of such calls."""
    schema: dict[str, Any] = {"anyOf": [_call(index, tool, tools) for index, tool in enumerate(_wanted(tools))]}
    if tools.tool_format is not MISTRAL:
        return schema
    schema = {"type": "array", "items": _moved(schema, "#/anyOf/", "#/items/anyOf/"), "minItems": 1}
    return schema if tools.parallel else {**schema, "maxItems": 1}


def _free(tools: ValidTools, tokenizer: TextTokenizer, reasoning: ReasoningFormat | None) -> str:
    """The rules around `object` where text may stand before, between and behind calls."""
    [(start, end)] = tools.tool_format.ends.items()
    repeat = "*" if tools.parallel else "?"
    object_and_end = f'"\\n" object "\\n" {_mark(end, tokenizer)}' if end else "object"
    # Tokens of their own are no text to the grammar library: those of reasoning must be named.
    ids = [tokenizer.token_id(mark) for mark in (reasoning.marks if reasoning is not None else ())]
    inner = " | ".join(f"<[{token_id}]>" for token_id in ids if token_id is not None)
    before = f"(TEXT? ({inner}))* " if inner else ""
    marked = re.escape(start).replace("/", r"\/")
    words = f"text: {before}TEXT?\nTEXT: /(.|\\n)+/ & ~/(.|\\n)*{marked}(.|\\n)*/"
    if tokenizer.token_id(start) is not None:
        return f"start: text ({_mark(start, tokenizer)} {object_and_end} text){repeat}\n{words}"
    opened = f"opened[lazy]: /(.|\\n)*{marked}/"
    return f"start: ({before}opened {object_and_end}){repeat} text\n{words}\n{opened}"


def _forced(tools: ValidTools, tokenizer: TextTokenizer) -> str:
    """The rules around `object` where there is nothing but calls."""
    tool_format = tools.tool_format
    if tool_format is MISTRAL:
        [start] = tool_format.starts
        return f"start: {_mark(start, tokenizer)} object"
    call, separator = "object", "; " if tool_format is LLAMA3_JSON else "\\n"
    if tool_format is HERMES:
        [(start, end)] = tool_format.ends.items()
        call = f'{_mark(start, tokenizer)} "\\n" object "\\n" {_mark(end, tokenizer)}'
    more = f' ("{separator}" call)*' if tools.parallel else ""
    return f"start: call{more}\ncall: {call}"


def _mark(mark: str, tokenizer: TextTokenizer) -> str:
    """A mark as its own token where it has one, else as text."""
    token_id = tokenizer.token_id(mark)
    return msgspec.json.encode(mark).decode() if token_id is None else f"<[{token_id}]>"


def _wanted(tools: ValidTools) -> list[dict[str, Any]]:
    return [tool["function"] for tool in tools.definitions if tool["function"]["name"] in tools.names]


def _call(index: int, function: dict[str, Any], tools: ValidTools) -> dict[str, Any]:
    """The schema of a call's object. The tool's own schema moves into it, and what it refers to with it."""
    key = _arguments_key(tools.tool_format)
    arguments: Any = {"type": "object"}
    if tools.is_forced or function.get("strict"):
        arguments = _moved(function.get("parameters") or _NO_ARGUMENTS, "#", f"#/anyOf/{index}/properties/{key}")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _arguments_key(tool_format: ToolFormat) -> str:
    return "parameters" if tool_format is LLAMA3_JSON else "arguments"


def _moved(schema: Any, old: str, new: str) -> Any:
    """The schema with its references to places under `old` pointing to `new`."""
    if isinstance(schema, list):
        return [_moved(part, old, new) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, old, new) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith(old):
        moved["$ref"] = new + reference.removeprefix(old)
    return moved
