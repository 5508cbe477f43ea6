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

MAX_LARK = 8192
"""Characters that the Lark grammars of a request may have together, if they are to be enforced: they are rewritten on
the event loop, in up to 10 ms for each 1,000 of them."""

_ENFORCED = {"lark": MAX_LARK, "regex": MAX_GRAMMAR_BYTES}
"""Limit for the grammars of each syntax; all regular expressions take about 10 ms, too."""


class CustomTools:
    """The custom tools of a request."""

    def __init__(self) -> None:
        self.inputs: dict[str, str] = {}
        """By name: the pattern of the input; empty: any text."""
        self.warnings: list[str] = []
        self._room = dict(_ENFORCED)

    def as_function(self, field: str, custom: dict[str, Any]) -> dict[str, Any]:
        """A tool as a function; its name and description have been checked.

        Raises:
            InvalidParameter: naming what is wrong with its format.
        """
        name, shown, pattern = str(custom["name"]), "", ""
        syntax, definition = _grammar(f"{field}.format", custom.get("format"))
        if syntax:
            shown = f" It must match this {_SYNTAXES[syntax]}:\n{definition}"
            try:
                pattern = anchored(self._pattern_of(syntax, definition))
            except NoPatternError as error:
                told = f"the grammar of {name!r} is shown to the model, but not enforced: {error}"
                self.warnings.append(f"tools: {told}")
        self.inputs[name] = pattern
        described = {key: custom[key] for key in ("name", "description") if custom.get(key) is not None}
        function = {**described, "parameters": _parameters({"description": f"The input, as plain text.{shown}"})}
        return {"type": "function", "function": function}

    def _pattern_of(self, syntax: str, definition: str) -> str:
        self._room[syntax] -= len(definition)
        if self._room[syntax] < 0:
            most = _ENFORCED[syntax]
            raise NoPatternError(f"the {_SYNTAXES[syntax]}s of a request may have {most} characters together")
        return pattern_of(definition) if syntax == "lark" else definition


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
