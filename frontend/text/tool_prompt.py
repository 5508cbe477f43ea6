"""Tools as chat templates are shown them: with the fields that they need, or as text for templates without tools."""

from dataclasses import dataclass
from typing import Any

from penstock.frontend.text.call_style import functions_of
from penstock.frontend.text.sandbox import tojson

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
_MAX_DEPTH = 32
_SCHEMAS = ("properties", "$defs", "definitions")
"""Keywords that hold schemas by name."""
_PARTS = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class ToolFields:
    """Which fields a template needs in every tool. No API asks for them; only the prompt gets them."""

    descriptions: bool = False
    parameters: bool = False
    types: bool = False
    """Whether each schema must have one type: of a list or of alternatives, the first that is not null is shown."""

    def fill(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tools with these fields."""
        return [{**tool, "function": self._function(tool["function"])} for tool in tools]

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        filled = {"name": function.get("name"), "description": "", **function} if self.descriptions else {**function}
        if self.parameters:
            filled["parameters"] = {**_NO_PARAMETERS, **(function.get("parameters") or {})}
        if isinstance(filled.get("parameters"), dict) and (self.types or self.descriptions):
            filled["parameters"] = self._schema(filled["parameters"], 0)
        return filled

    def _schema(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return schema
        filled = {**schema}
        if self.types:
            filled = _with_one_type(filled)
        if self.descriptions and depth:
            filled.setdefault("description", "")
        for name in _SCHEMAS:
            if isinstance(filled.get(name), dict):
                filled[name] = {key: self._schema(part, depth + 1) for key, part in filled[name].items()}
        for name in ("items", "additionalProperties"):
            if isinstance(filled.get(name), dict):
                filled[name] = self._schema(filled[name], depth + 1)
        return filled


def _with_one_type(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a type, and what belongs to that type."""
    said = schema.get("type")
    if isinstance(said, list):
        said = next((kind for kind in said if isinstance(kind, str) and kind != "null"), "null")
    if not isinstance(said, str):
        for name in _PARTS:
            parts = schema.get(name)
            first = next((part for part in parts if _says_more(part)), None) if isinstance(parts, list) else None
            if first is not None:
                rest = {key: value for key, value in schema.items() if key != name}
                return _with_one_type({**first, **rest})
        said = "object" if "properties" in schema else "array" if "items" in schema else "string"
    filled = {**schema, "type": said}
    if said == "array" and not isinstance(filled.get("items"), dict):
        filled["items"] = {"type": "string"}
    if said == "object" and not isinstance(filled.get("properties"), dict):
        filled["properties"] = {}
    if said == "object":
        filled.setdefault("additionalProperties", {"type": "string"})
    return filled


def _says_more(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") != "null"


GENERIC_EXAMPLE = '<tool_call>\n{"name": "the name", "arguments": {"a parameter": "its value"}}\n</tool_call>'


def generic_tool_prompt(tools: list[dict[str, Any]], example: str = "") -> str:
    """Instructions for models whose template shows no tools.

    `example` is a call as the template writes past ones; if it writes none, what is asked for is the `generic` format.
    """
    listed = "\n".join(tojson(tool["function"]) for tool in tools)
    return (
        "You can call functions. These are available, one on each line, with JSON schemas of their parameters:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, write its name and its arguments exactly in this form, once for each call:\n"
        f"{example or GENERIC_EXAMPLE}\n\n"
        "If no function is needed, answer in plain text."
    )


def generic_calls(calls: list[Any]) -> str:
    """Past calls in the form that `generic_tool_prompt` asks for."""
    return "\n".join(f"<tool_call>\n{tojson(function)}\n</tool_call>" for function in functions_of(calls))


def generic_result(text: str) -> str:
    """A result in the form that `generic_tool_prompt` speaks of."""
    return f"<tool_response>\n{text}\n</tool_response>"
