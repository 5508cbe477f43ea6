"""Custom tools, whose input is a text instead of arguments.

Chat templates show functions only, and models write arguments: so such a tool becomes a function with one parameter,
and `parsing/custom_input.py` turns its calls back. A grammar that the input must match is shown to the model.
"""

from typing import Any

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.parsing.custom_input import INPUT, SYNTAXES, InputGrammar
from penstock.frontend.validation.grammar import MAX_GRAMMAR_BYTES


def as_function(field: str, custom: dict[str, Any]) -> tuple[dict[str, Any], InputGrammar]:
    """A tool as a function, and what its input must match; its name and description have been checked.

    Raises:
        InvalidParameter: naming what is wrong with its format.
    """
    grammar = _grammar(f"{field}.format", custom.get("format"))
    shown = f" It must match this {SYNTAXES[grammar.syntax]}:\n{grammar.definition}" if grammar.syntax else ""
    described = {key: custom[key] for key in ("name", "description") if custom.get(key) is not None}
    function = {**described, "parameters": _parameters({"description": f"The input, as plain text.{shown}"})}
    return {"type": "function", "function": function}, grammar


def enforced_parameters(pattern: str) -> dict[str, Any]:
    """The JSON schema that the arguments of a call must match."""
    return _parameters({"pattern": pattern} if pattern else {})


def _parameters(said: dict[str, str]) -> dict[str, Any]:
    text = {"type": "string", **said}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _grammar(field: str, given: Any) -> InputGrammar:
    """A format's grammar; chats put it into a nested object."""
    if given is None:
        return InputGrammar()
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return InputGrammar()
    if kind != "grammar":
        raise InvalidParameter(f"{field}.type must be 'text' or 'grammar'", param=f"{field}.type")
    grammar = given.get("grammar", given)
    syntax, definition = (grammar.get(name) if isinstance(grammar, dict) else None for name in ("syntax", "definition"))
    if syntax not in SYNTAXES:
        raise InvalidParameter(f"{field}.syntax must be 'lark' or 'regex'", param=f"{field}.syntax")
    if not isinstance(definition, str) or not definition.strip():
        raise InvalidParameter(f"{field}.definition: expected a text, the grammar", param=f"{field}.definition")
    num_bytes = len(definition.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(
            f"{field}.definition may have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}",
            param=f"{field}.definition",
        )
    return InputGrammar(syntax, definition)
