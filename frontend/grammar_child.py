"""The process that reads grammars: `python -m penstock.frontend.grammar_child FOLDER PARENT`.

A grammar is code of a client's making: reading it may take for ever, eat the memory or crash. Hence this
process of its own (see `child_pool.py`). [kind, text] is answered with [grammar, error].
"""

import random
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.config import ConfigError
from penstock.core.config.grammar import grammar_vocabulary, make_matcher
from penstock.frontend.child_pool import answer, limit_resources
from penstock.frontend.json_schema import GrammarError, check_pattern, check_repetitions, check_schema
from penstock.ipc import process

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_WHITESPACE = 24
"""Characters between two marks of a JSON text, enough for a line break and an indentation. Without a bound a
model may go on with blanks for ever."""

_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
"""Calls come in the white space that models have learned them in."""

_TRIED_TOKENS = 24
"""Length of the text that is drawn on trial: a grammar that cannot go on, or not fast, mostly shows it there."""


def read_grammar(vocabulary: "LLTokenizer", kind: str, text: str) -> str:
    """From a grammar as a client writes it to the text that the worker's matcher reads.

    Args:
        vocabulary: the model's tokens.
        kind: "json" (a JSON schema), "regex", "choice" (a JSON list of texts), "grammar" (Lark, or GBNF) or
            "calls" (a JSON list: Lark, the JSON schemas that it refers to by name, and a [kind, text] for its `form`).
        text: the grammar.

    Raises:
        GrammarError: if it cannot be read, has features that are not supported, or matches nothing.
    """
    import llguidance

    try:
        match kind:
            case "json":
                check_schema(msgspec.json.decode(text))
                grammar = llguidance.LLMatcher.grammar_from_json_schema(
                    text,
                    overrides={
                        "whitespace_flexible": True,
                        "whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}",
                        "lenient": False,  # what is not implemented is refused
                        "coerce_one_of": False,
                    },
                )
            case "regex":
                check_pattern(text)
                grammar = llguidance.LLMatcher.grammar_from_regex(text)
            case "choice":
                choices = [msgspec.json.encode(choice).decode() for choice in msgspec.json.decode(text, type=list[str])]
                grammar = llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
            case "calls":
                grammar = llguidance.LLMatcher.grammar_from_lark(_output_rules(vocabulary, text))
            case _:
                check_repetitions(text)
                from llguidance.gbnf_to_lark import any_to_lark

                grammar = llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
    except (GrammarError, MemoryError):
        raise
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # the library has several kinds, of no common base
        raise GrammarError(_shortened(str(error))) from None
    matcher = make_matcher(vocabulary, grammar)
    if matcher.is_error():
        raise GrammarError(_shortened(matcher.get_error()))
    _try_out(matcher)
    return grammar


def _output_rules(vocabulary: "LLTokenizer", text: str) -> str:
    """The Lark of an output: rules, and what they refer to: JSON schemas by name, and a form."""
    lark, schemas, form = msgspec.json.decode(text, type=tuple[str, dict[str, Any], tuple[str, str] | None])
    rules = [lark]
    for name, schema in schemas.items():
        rules.append(f"{name}: {_json_rule(schema)}")
    if form is not None:
        read_grammar(vocabulary, *form)  # alone it shows better what is wrong with it
        rules.append(f"form: {_form_rule(*form)}")
    return "\n".join(rules) + "\n"


def _json_rule(schema: Any) -> str:
    check_schema(schema)
    if not isinstance(schema, dict):
        return f"%json {msgspec.json.encode(schema).decode()}"
    return f"%json {msgspec.json.encode({**schema, 'x-guidance': _AS_TEMPLATES_WRITE}).decode()}"


def _form_rule(kind: str, text: str) -> str:
    match kind:
        case "json":
            return _json_rule(msgspec.json.decode(text))
        case "regex":
            check_pattern(text)
            return f"/{_UNESCAPED_SLASH.sub(_escaped_slash, text)}/"
        case "choice":
            return " | ".join(msgspec.json.encode(choice).decode() for choice in msgspec.json.decode(text))
    check_repetitions(text)
    from llguidance.gbnf_to_lark import any_to_lark

    return f"%lark {{\n{any_to_lark(text)}\n}}"


_UNESCAPED_SLASH = re.compile(r"\\.|/", re.DOTALL)


def _escaped_slash(found: re.Match[str]) -> str:
    return r"\/" if found[0] == "/" else found[0]


def _try_out(matcher: "LLMatcher") -> None:
    """Draw a short text, always the same one for the same grammar."""
    draw = random.Random(0)
    for num_tokens in range(_TRIED_TOKENS):
        if matcher.is_stopped() and not matcher.is_error() and num_tokens:
            return
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"it cannot be followed: {_shortened(matcher.get_error())}")
        if matcher.is_stopped() and not num_tokens and not matcher.is_accepting():
            raise GrammarError("nothing matches it")
        candidates = [i for i, byte in enumerate(mask) if byte]
        if not candidates:
            raise GrammarError("nothing matches it" if not num_tokens else f"nothing goes on after {num_tokens} tokens")
        byte = draw.choice(candidates)
        token_id = 8 * byte + draw.choice([bit for bit in range(8) if mask[byte] >> bit & 1])
        if not matcher.consume_token(token_id):
            raise GrammarError(f"it cannot be followed: {_shortened(matcher.get_error())}")


def _shortened(message: str) -> str:
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    return " ".join(line for line in lines if line)[:300]


def main(argv: list[str]) -> int:
    """Answer until stdin ends; the exit code."""
    folder, parent = argv
    process.end_with_parent(int(parent))
    process.begin("penstock-grammar", "warning")
    limit_resources()
    try:
        vocabulary = grammar_vocabulary(Path(folder))
    except ConfigError as error:
        answer(["", str(error)])
        return 2
    answer([])
    for line in sys.stdin.buffer:
        kind, text = msgspec.json.decode(line, type=tuple[str, str])
        try:
            answer([read_grammar(vocabulary, kind, text), ""])
        except GrammarError as error:
            answer(["", str(error) or "it cannot be read"])
        except MemoryError:
            answer(["", "reading it takes too much memory"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
