"""The grammars of custom tools' inputs as regular expressions, in which form they are enforced."""

from collections.abc import Mapping

from penstock.frontend.parsing.custom_input import SYNTAXES, InputGrammar
from penstock.frontend.patterns import anchored
from penstock.frontend.validation.grammar import MAX_GRAMMAR_BYTES
from penstock.parts.grammars.frontend.lark_pattern import NoPatternError, pattern_of

MAX_LARK = 8192
"""Characters that the Lark grammars of a request may have together, if they are to be enforced: they are rewritten on
the event loop, in up to 10 ms for each 1,000 of them."""

_ENFORCED = {"lark": MAX_LARK, "regex": MAX_GRAMMAR_BYTES}
"""Limit for the grammars of each syntax; all regular expressions take about 10 ms, too."""


def patterns_of(inputs: Mapping[str, InputGrammar]) -> tuple[dict[str, str], list[str]]:
    """The pattern of each tool's input (empty: any text), and warnings about those that are not enforced."""
    room = dict(_ENFORCED)
    patterns: dict[str, str] = {}
    warnings: list[str] = []
    for name, (syntax, definition) in inputs.items():
        patterns[name] = ""
        if not syntax:
            continue
        room[syntax] -= len(definition)
        try:
            if room[syntax] < 0:
                most = _ENFORCED[syntax]
                raise NoPatternError(f"the {SYNTAXES[syntax]}s of a request may have {most} characters together")
            patterns[name] = anchored(pattern_of(definition) if syntax == "lark" else definition)
        except NoPatternError as error:
            warnings.append(f"tools: the grammar of {name!r} is shown to the model, but not enforced: {error}")
    return patterns, warnings
