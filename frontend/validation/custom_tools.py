"""Custom tools, whose input is a text instead of arguments.

Chat templates show functions only, and models write arguments: so such a tool becomes a function with one parameter,
and `parsing/custom_input.py` turns its calls back. A grammar that the input must match is shown to the model, and
enforced where it can be written as a regular expression.
"""

from typing import Any

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.grammars.lark_pattern import NoPatternError, pattern_of
from penstock.frontend.parsing.custom_input import INPUT
from penstock.frontend.patterns import anchored
from penstock.frontend.validation.grammar import MAX_GRAMMAR_BYTES

_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


def as_function(field: str, tool: dict[str, Any], warnings: list[str]) -> tuple[dict[str, Any], str]:
    """A custom tool in the shape of chats as a function, and the pattern of its input; empty: any text.

    Raises:
        InvalidParameter: naming what is wrong with the tool.
    """
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise InvalidParameter(f"{field}.custom: expected an object", param=f"{field}.custom")
    grammar, pattern = "", ""
    syntax, definition = _grammar(f"{field}.custom.format", custom.get("format"))
    if syntax:
        grammar = f" It must match this {_SYNTAXES[syntax]}:\n{definition}"
        try:
            pattern = anchored(pattern_of(definition) if syntax == "lark" else definition)
        except NoPatternError as error:
            name = str(custom.get("name"))[:64]
            warnings.append(f"tools: the grammar of {name!r} is shown to the model, but not enforced: {error}")
    described = {name: custom[name] for name in ("name", "description") if custom.get(name) is not None}
    function = {**described, "parameters": _parameters({"description": f"The input, as plain text.{grammar}"})}
    return {"type": "function", "function": function}, pattern


def enforced_parameters(pattern: str) -> dict[str, Any]:
    """The JSON schema that the arguments of a call must match."""
    return _parameters({"pattern": pattern} if pattern else {})


def _parameters(said: dict[str, str]) -> dict[str, Any]:
    text = {"type": "string", **said}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _grammar(field: str, given: Any) -> tuple[str, str]:
    """The syntax and the definition of a format's grammar; chats put them into a nested object. Empty: any text."""
    if given is None:
        return "", ""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return "", ""
    if kind != "grammar":
        raise InvalidParameter(f"{field}.type must be 'text' or 'grammar'", param=f"{field}.type")
    grammar = given.get("grammar", given)
    syntax, definition = (grammar.get(name) if isinstance(grammar, dict) else None for name in ("syntax", "definition"))
    if syntax not in _SYNTAXES:
        raise InvalidParameter(f"{field}.syntax must be 'lark' or 'regex'", param=f"{field}.syntax")
    if not isinstance(definition, str) or not definition.strip():
        raise InvalidParameter(f"{field}.definition: expected a text, the grammar", param=f"{field}.definition")
    num_bytes = len(definition.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(
            f"{field}.definition may have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}",
            param=f"{field}.definition",
        )
    return syntax, definition
