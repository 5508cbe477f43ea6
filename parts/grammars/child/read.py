"""The process that parses grammars: `python -m penstock.parts.grammars.child.read MODEL [open-objects] PARENT`.

A grammar is code written by a client: parsing it may take for ever, exhaust memory or crash. Hence this separate
process (see `child_pool.py`). [kind, text] is answered with [grammar, error, bytes of memory, what is not enforced],
and ["check", schema, text] with [what is wrong with the text].
"""

import ctypes
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.config import ConfigError
from penstock.frontend.text.child_pool import answer, limit_resources
from penstock.ipc import process
from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary, make_matcher
from penstock.parts.grammars.child.json_check import check_is_schema, mismatch
from penstock.parts.grammars.child.json_parts import settle_patterns
from penstock.parts.grammars.child.json_patterns import within_json
from penstock.parts.grammars.child.json_repair import repair
from penstock.parts.grammars.child.json_schema import (
    GrammarError,
    Schema,
    check_pattern,
    check_repetitions,
    check_schema,
    schemas_of,
)
from penstock.parts.grammars.child.json_superset import notes_of, superset_of
from penstock.parts.grammars.child.json_values import bound_anything

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_AS_MODELS_WRITE: dict[str, str | bool] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON white space: at most one space after a comma or colon, as in models' training data for JSON on one line.
If more is allowed, small models keep writing spaces, sometimes for ever."""

_AS_TEMPLATES_WRITE: dict[str, str | bool] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""The white space of calls: exactly that of the templates that models were trained with."""

_PRIORITY = 10
"""The process's niceness: running requests come first."""

OPEN_OBJECTS = "open-objects"

_TRIED_TOKENS = 24
"""Length of the sample texts: a grammar that gets stuck, or is slow, usually shows it within this length."""

_NUM_TRIED = 4
_TRY_SECONDS = 0.1
"""CPU time after which no further sample is begun."""

_MARKS = '"{}[],: 0123456789-.'
"""Every other token of the later samples is one of these where it may be: they lead to where grammars get stuck."""

_NOTHING_FITS = "NoExtension"
"""In the library's words."""

MAX_BYTES = 64 << 20
"""Limit for the memory of a prepared grammar. A typical one takes a megabyte."""


class ReadGrammar(NamedTuple):
    """A grammar that can be used."""

    text: str  # as the worker's matcher reads it
    not_enforced: tuple[str, ...]  # what it accepts although it should not, in words for the client
    num_bytes: int  # memory that it takes, approximately


class _Reading(NamedTuple):
    """One grammar that is being read."""

    vocabulary: "LLTokenizer"
    open_objects: bool
    left_out: dict[str, None]  # what cannot be enforced, in words for the client

    def note(self, keyword: str) -> None:
        """Record that a keyword is not enforced."""
        self.left_out.setdefault(f"{keyword} is not enforced while the text is written")


def read_grammar(vocabulary: "LLTokenizer", kind: str, text: str, *, open_objects: bool = False) -> ReadGrammar:
    """Turn a client's grammar into one that the worker can use.

    Args:
        vocabulary: the model's tokens.
        kind: "json" (a JSON schema), "regex", "choice" (a JSON list of texts), "grammar" (Lark, or GBNF) or
            "calls" (a JSON list: Lark; the JSON schemas that it refers to by name, each with a substitute in case it
            cannot be used; a [kind, text] for its `form`; and the texts that it refers to by name, as in `_text_rule`).
        text: the grammar.
        open_objects: whether objects may have properties that their JSON schema does not list, if it says nothing of
            such properties.

    Raises:
        GrammarError: if it cannot be parsed, has unsupported features, or matches nothing.
    """
    import llguidance

    reading = _Reading(vocabulary, open_objects, {})
    before = _allocated_bytes()
    try:
        match kind:
            case "json":
                grammar = _read_schema(reading, msgspec.json.decode(text))
            case "regex":
                check_pattern(text)
                grammar = llguidance.LLMatcher.grammar_from_regex(text)
            case "choice":
                choices = [msgspec.json.encode(choice).decode() for choice in msgspec.json.decode(text, type=list[str])]
                grammar = llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
            case "calls":
                grammar = llguidance.LLMatcher.grammar_from_lark(_output_rules(reading, text))
            case _:
                check_repetitions(text)
                from llguidance.gbnf_to_lark import any_to_lark

                grammar = llguidance.LLMatcher.grammar_from_lark(any_to_lark(text))
    except (GrammarError, MemoryError):
        raise
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # the library raises several kinds without a common base
        raise GrammarError(_shortened(str(error))) from None
    matcher = make_matcher(vocabulary, grammar)
    if matcher.is_error():
        raise GrammarError(_shortened(matcher.get_error()))
    _try_out(vocabulary, matcher)
    num_bytes = max(0, _allocated_bytes() - before)
    if num_bytes > MAX_BYTES:
        raise GrammarError(f"it takes {num_bytes >> 20} MiB of memory; at most {MAX_BYTES >> 20} are allowed")
    return ReadGrammar(grammar, tuple(reading.left_out), num_bytes)


_LENIENT: dict[str, str | bool] = {"lenient": True}
"""The library ignores what it does not implement, and reports it."""


def _read_schema(reading: _Reading, schema: Any) -> str:
    if schema is True:
        schema = {}
    return _superset(reading, schema, _AS_MODELS_WRITE)


def _superset(reading: _Reading, schema: Any, blanks: dict[str, str | bool]) -> str:
    """The grammar of all texts that match a schema, and of few others. Changes the schema to fit the grammar."""
    vocabulary, note = reading.vocabulary, reading.note
    check_schema(schema)
    original = msgspec.json.encode(schema)
    superset_of(schema, note, open_objects=reading.open_objects)
    settle_patterns(schema, lambda part: not _compiled(vocabulary, part, blanks, _unheard)[1])
    plain = msgspec.json.encode(schema)
    if bound_anything(schema):
        grammar, error = _compiled(vocabulary, schema, blanks, note)
        if not error:
            return grammar
        schema.clear()
        schema.update(msgspec.json.decode(plain))
    grammar, error = _compiled(vocabulary, schema, blanks, note)
    if error:
        if "is not present in a registry" in error:
            raise GrammarError(f"only references within the schema are supported, nothing is fetched: {error}")
        if "nsatisfiable" in error or "does not exist" in error:
            raise GrammarError(error)
        check_is_schema(msgspec.json.decode(original))

        def reads(part: Schema) -> bool:
            return not _compiled(vocabulary, part, blanks, _unheard)[1]

        repair(schema, reads, note)
        grammar, error = _compiled(vocabulary, schema, blanks, note)
        if error:
            raise GrammarError(error)
    return grammar


def _unheard(_keyword: str) -> None:
    """For schemas that are only tried."""


def _compiled(
    vocabulary: "LLTokenizer", schema: Any, blanks: dict[str, str | bool], note: Callable[[str], None]
) -> tuple[str, str]:
    """A schema's grammar, or what is wrong with it. What the library ignores is recorded."""
    import llguidance

    try:
        options: Any = {**_LENIENT, **blanks}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(_as_told(schema), overrides=options)
        matcher = make_matcher(vocabulary, grammar)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        return "", _shortened(str(error))
    if matcher.is_error():
        return "", _shortened(matcher.get_error())
    try:
        _try_out(vocabulary, matcher)
    except GrammarError as error:
        return "", str(error)
    notes_of(map(str, matcher.get_grammar_warnings()), note)
    return grammar, ""


def _as_told(schema: Schema) -> str:
    """A schema's JSON as the library is told it, with its patterns in the library's dialect."""
    told = msgspec.json.decode(msgspec.json.encode(schema))
    for part in schemas_of(told):
        if isinstance(part.get("pattern"), str):
            part["pattern"] = within_json(part["pattern"])
        if isinstance(part.get("patternProperties"), dict):
            part["patternProperties"] = {within_json(name): of for name, of in part["patternProperties"].items()}
    return msgspec.json.encode(told).decode()


class _Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated_bytes() -> int:
    """Bytes that this process has allocated and not freed; 0 if the C library does not report it."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _Allocated
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _output_rules(reading: _Reading, text: str) -> str:
    """The Lark of an output: rules, and the JSON schemas (by name), the form and the texts that they refer to."""
    lark, schemas, form, texts = msgspec.json.decode(
        text, type=tuple[str, dict[str, tuple[Any, Any]], tuple[str, str] | None, dict[str, tuple[str, str, str, str]]]
    )
    rules = [lark]
    for name, (schema, instead) in schemas.items():
        try:
            rule = _schema_rule(reading, schema, _AS_TEMPLATES_WRITE)
        except MemoryError:
            raise
        except Exception as error:  # a tool's schema: often written by others, and not always valid
            reason = str(error) if isinstance(error, GrammarError) else "it cannot be read"
            reading.left_out.setdefault(f"a schema is not enforced: {reason}")
            rule = _schema_rule(reading, instead, _AS_TEMPLATES_WRITE)
        rules.append(f"{name}: {rule}")
    rules += (_text_rule(reading, name, *parts) for name, parts in texts.items())
    if form is not None:
        read_grammar(
            reading.vocabulary, *form, open_objects=reading.open_objects
        )  # read by itself first, for clearer errors
        rules.append(f"form: {_form_rule(reading, *form)}")
    return "\n".join(rules) + "\n"


def _schema_rule(reading: _Reading, schema: Any, blanks: dict[str, str | bool]) -> str:
    """The Lark expression for JSON that matches a schema, as far as it can be enforced."""
    if schema is True:
        schema = {}
    _superset(reading, schema, blanks)
    return f"%json {_as_told({**schema, 'x-guidance': {**_LENIENT, **blanks}})}"


def _text_rule(reading: _Reading, name: str, pattern: str, end: str, without: str, instead: str) -> str:
    """The Lark rule for a text of a pattern, with what ends it.

    Args:
        reading: notes what is not enforced.
        name: of the rule.
        pattern: a regular expression, which may be a client's.
        end: what follows the text, as a regular expression in Lark's form.
        without: what text and end together are not, in the same form.
        instead: the expression for any text and its end.
    """
    import llguidance

    written = _UNESCAPED_SLASH.sub(_escaped_slash, pattern).replace("\n", r"\n")
    terminal = f"{name.upper()}: /(?:{written}){end}/ & ~/{without}/"
    try:
        check_pattern(pattern)
        rule = f"{name.upper()}{'?' if not end and _may_be_empty(pattern) else ''}"
        matcher = make_matcher(
            reading.vocabulary, llguidance.LLMatcher.grammar_from_lark(f"start: {rule}\n{terminal}\n")
        )
        wrong = _shortened(matcher.get_error()) if matcher.is_error() else ""
    except MemoryError:
        raise
    except Exception as error:
        wrong = str(error) if isinstance(error, GrammarError) else "it cannot be read"
    if wrong:
        reading.left_out.setdefault(f"a pattern is not enforced: {wrong}")
        return f"{name}: {instead}"
    return f"{name}: {rule}\n{terminal}"


def _may_be_empty(pattern: str) -> bool:
    try:
        return re.fullmatch(pattern, "") is not None
    except re.error:  # the library knows more than Python
        return False


def _form_rule(reading: _Reading, kind: str, text: str) -> str:
    match kind:
        case "json":
            return _schema_rule(reading, msgspec.json.decode(text), _AS_MODELS_WRITE)
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


def _try_out(vocabulary: "LLTokenizer", matcher: "LLMatcher") -> None:
    """Generate a few short texts, always the same ones for the same grammar."""
    until = process_time() + _TRY_SECONDS
    marks = [ids[0] for mark in _MARKS if len(ids := vocabulary.tokenize_str(mark)) == 1]
    for seed in range(_NUM_TRIED):
        _write_sample(matcher.deep_copy(), random.Random(seed), marks if seed else [])
        if process_time() > until:
            return


def _write_sample(matcher: "LLMatcher", draw: random.Random, marks: list[int]) -> None:
    for num_tokens in range(_TRIED_TOKENS):
        if matcher.is_stopped() and not matcher.is_error() and num_tokens:
            return
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            if _NOTHING_FITS in matcher.get_error():
                raise GrammarError(_nothing_after(num_tokens))
            raise GrammarError(f"it cannot be used: {_shortened(matcher.get_error())}")
        if matcher.is_stopped() and not num_tokens and not matcher.is_accepting():
            raise GrammarError(_nothing_after(0))
        candidates = [i for i, byte in enumerate(mask) if byte]
        if not candidates:
            raise GrammarError(_nothing_after(num_tokens))
        allowed_marks = [token_id for token_id in marks if mask[token_id >> 3] >> (token_id & 7) & 1]
        if allowed_marks and draw.random() < 0.5:
            token_id = draw.choice(allowed_marks)
        else:
            byte = draw.choice(candidates)
            token_id = 8 * byte + draw.choice([bit for bit in range(8) if mask[byte] >> bit & 1])
        if not matcher.consume_token(token_id):
            raise GrammarError(f"it cannot be used: {_shortened(matcher.get_error())}")


def _nothing_after(num_tokens: int) -> str:
    return f"the grammar has no valid continuation after {num_tokens} tokens" if num_tokens else "nothing matches it"


def _shortened(message: str) -> str:
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    return " ".join(line for line in lines if line)[:300]


def main(argv: list[str]) -> int:
    """Answer until stdin ends; return the exit code."""
    path, *options, parent = argv
    process.end_with_parent(int(parent))
    process.begin("penstock-grammar", "warning")
    limit_resources()
    os.nice(_PRIORITY)
    try:
        vocabulary = grammar_vocabulary(open_checkpoint(Path(path)))
    except ConfigError as error:
        answer(["", str(error)])
        return process.EXIT_CONFIG
    answer([])
    for line in sys.stdin.buffer:
        kind, *texts = msgspec.json.decode(line, type=list[str])
        try:
            if kind == "check":
                answer([mismatch(*texts)])
            else:
                read = read_grammar(vocabulary, kind, *texts, open_objects=OPEN_OBJECTS in options)
                answer([read.text, "", read.num_bytes, read.not_enforced])
        except GrammarError as error:
            answer(["", str(error) or "it cannot be parsed", 0, ()])
        except MemoryError:
            answer(["", "parsing it takes too much memory", 0, ()])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
