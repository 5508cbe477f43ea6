"""The grammar of an output that must be tool calls, for `tool_choice` "required" and a named tool.

It is written the way the model's chat template teaches: its marks, then one object (or an array of them)
of a tool's name and of arguments that match the tool's schema. A forced call is not preceded by reasoning.
"""

from dataclasses import replace
from typing import Any

import msgspec

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.grammars import GrammarSource
from penstock.frontend.tokenizer import TextTokenizer
from penstock.frontend.tool_formats import HERMES, LLAMA3_JSON, MISTRAL, ToolFormat
from penstock.frontend.validate import ValidRequest
from penstock.frontend.validate_grammar import MAX_GRAMMAR_BYTES
from penstock.frontend.validate_tools import ValidTools

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def with_forced_calls(common: ValidRequest, tools: ValidTools | None, tokenizer: TextTokenizer) -> ValidRequest:
    """The request with the grammar of its calls, if it must make some.

    Raises:
        InvalidParameter: if the output must match something else too, cannot end, or the tools are too large.
    """
    if tools is None or not tools.is_forced:
        return common
    field = "tool_choice"
    if common.grammar is not None:
        raise InvalidParameter(f"{common.grammar.field} and a forced tool_choice exclude each other", param=field)
    if common.bad_words or common.user_stop_token_ids.issuperset(common.sampling.stop_token_ids):
        raise InvalidParameter("a forced tool_choice excludes ignore_eos and bad_words", param=field)
    try:
        text = msgspec.json.encode([_lark(tools, tokenizer), _schema(tools)]).decode()
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


def _lark(tools: ValidTools, tokenizer: TextTokenizer) -> str:
    """The rules around `object`."""
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
