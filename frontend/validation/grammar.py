"""Finds what outputs must match in the fields of requests, and checks that it is small enough to be read.

A part reads it (`api/grammar_part.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.schema import ResponseFormat, SamplingRequest, StructuredOutputs

GrammarKind = Literal["json", "regex", "choice", "grammar", "calls", "tags"]

MAX_GRAMMAR_BYTES = 65536
MAX_CHOICES = 1024

GRAMMAR_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "json_schema", "guided_regex", "regex"),
    *("guided_grammar", "grammar", "ebnf", "guided_choice"),
)
"""The fields of `SamplingRequest` that constrain the output."""

_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as the client wrote it, small enough to be parsed."""

    kind: GrammarKind
    text: str
    field: str  # of the request; named in errors
    is_strict: bool = False  # refuse the grammar if anything in it cannot be enforced
    schema: str = ""  # JSON: finished texts are checked against it if it cannot be fully enforced
    warnings: tuple[str, ...] = ()  # for the client


def check_grammar(request: SamplingRequest, eos_token_ids: tuple[int, ...]) -> GrammarSource | None:
    """Return the request's grammar, whichever field contains it; None if the output is unconstrained.

    Raises:
        InvalidParameter: with the field, the limit and the value.
        UnsupportedParameter: if it cannot be combined with the rest of the request.
    """
    sources = [source for source in _sources(request) if source is not None]
    if len(sources) > 1:
        raise InvalidParameter(
            f"{sources[0].field} and {sources[1].field} exclude each other", param=sources[1].field.split(".")[0]
        )
    if sources:
        check_ending(request, sources[0].field, eos_token_ids)
        return sources[0]
    return None


def _sources(request: SamplingRequest) -> Iterator[GrammarSource | None]:
    """Each field that may hold a grammar: OpenAI's, vLLM's, its older ones, llama.cpp's, SGLang's."""
    if request.response_format is not None:
        yield response_format_source(request.response_format)
    if request.structured_outputs is not None:
        yield _structured_outputs(request.structured_outputs)
    for field in ("guided_json", "json_schema"):
        if (schema := getattr(request, field)) is not None:
            yield schema_source(field, schema)
    for field in ("guided_regex", "regex"):
        if (pattern := getattr(request, field)) is not None:
            yield _source("regex", field, pattern)
    for field in ("guided_grammar", "grammar", "ebnf"):
        if grammar := getattr(request, field):  # llama.cpp's clients send an empty string for no grammar
            yield _source("grammar", field, grammar)
    if request.guided_choice is not None:
        yield _choice("guided_choice", request.guided_choice)


def check_ending(request: SamplingRequest, field: str, eos_token_ids: tuple[int, ...]) -> None:
    """Refuse a grammar if nothing can end a text that matches it."""
    if request.ignore_eos:
        raise InvalidParameter(
            f"{field} and ignore_eos exclude each other: a text that matches ends with EOS", param="ignore_eos"
        )
    if request.bad_words:
        raise InvalidParameter(
            f"{field} and bad_words exclude each other: a bad word may be the only match", param="bad_words"
        )
    if not eos_token_ids:
        raise UnsupportedParameter(
            f"{field} is not supported for this model: it has no end-of-sequence token", param=field
        )


def response_format_source(response_format: ResponseFormat) -> GrammarSource | None:
    """The grammar of `response_format`: OpenAI's types, and other engines' types that hold one grammar."""
    own = response_format.json_schema
    match response_format.type:
        case "text":
            return None
        case "json_object":
            return schema_source("response_format.schema", response_format.schema)
        case "json_schema" if own is not None and own.schema is not None:
            return schema_source("response_format.json_schema.schema", own.schema, is_strict=own.strict is True)
        case "json_schema" if response_format.schema is not None:
            return schema_source("response_format.schema", response_format.schema)
        case "json_schema" if own is not None:
            return schema_source("response_format.json_schema.schema", None)
        case "json_schema":
            raise InvalidParameter(
                "response_format.json_schema is required for type 'json_schema'",
                param="response_format.json_schema",
            )
        case "regex":
            return _source("regex", "response_format.pattern", response_format.pattern or "")
        case "grammar":
            return _source("grammar", "response_format.grammar", response_format.grammar or "")
        case "structural_tag":
            tag = {name: getattr(response_format, name) for name in ("format", "structures", "triggers")}
            return _tags("response_format", tag)
    raise InvalidParameter(
        "response_format.type must be 'text', 'json_object', 'json_schema', 'regex', 'grammar' or 'structural_tag', "
        f"got {response_format.type[:64]!r}",
        param="response_format.type",
    )


def schema_source(field: str, schema: dict[str, Any] | str | None, *, is_strict: bool = False) -> GrammarSource:
    """The grammar of a JSON schema, given as an object or as JSON text; None means any object."""
    if schema is None:
        return GrammarSource("json", _ANY_OBJECT, field)
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    except RecursionError:
        raise InvalidParameter(f"{field} is nested too deeply", param=field) from None
    return replace(_source("json", field, text), is_strict=is_strict, schema=text)


def _structured_outputs(wanted: StructuredOutputs) -> GrammarSource | None:
    """The grammar of vLLM's `structured_outputs`: exactly one of its kinds."""
    given = [
        kind
        for kind in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        if getattr(wanted, kind) not in (None, False)
    ]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidParameter(
            f"structured_outputs: {' and '.join(given)} exclude each other", param=f"structured_outputs.{given[1]}"
        )
    field = f"structured_outputs.{given[0]}"
    if wanted.json is not None:
        return schema_source(field, wanted.json)
    if wanted.regex is not None:
        return _source("regex", field, wanted.regex)
    if wanted.choice is not None:
        return _choice(field, wanted.choice)
    if wanted.grammar is not None:
        return _source("grammar", field, wanted.grammar)
    if wanted.structural_tag is not None:
        return _tags(field, wanted.structural_tag)
    return GrammarSource("json", _ANY_OBJECT, field)


def _tags(field: str, tag: Any) -> GrammarSource:
    """The grammar of a structural tag, given as an object or as JSON text, in one of its two forms."""
    if isinstance(tag, str):
        try:
            tag = msgspec.json.decode(tag)
        except (msgspec.MsgspecError, RecursionError):
            raise InvalidParameter(f"{field} is not valid JSON", param=field) from None
    if not isinstance(tag, dict):
        raise InvalidParameter(f"{field} must be an object", param=field)
    form = tag.get("format")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if form is None:
        if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
            raise InvalidParameter(f"{field} must have a format, or structures and triggers", param=field)
        tags = [
            {**each, "type": "tag", "content": {"type": "json_schema", "json_schema": each.get("schema")}}
            for each in structures
        ]
        form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    try:
        text = msgspec.json.encode(form).decode()
    except RecursionError:
        raise InvalidParameter(f"{field} is nested too deeply", param=field) from None
    return _source("tags", field, text)


def _choice(field: str, choices: list[str]) -> GrammarSource:
    if not choices or not all(choices):
        raise InvalidParameter(f"{field} must hold at least one string, and no empty one", param=field)
    if len(choices) > MAX_CHOICES:
        raise InvalidParameter(f"{field} may hold at most {MAX_CHOICES} strings, got {len(choices)}", param=field)
    return _source("choice", field, msgspec.json.encode(choices).decode())


def _source(kind: GrammarKind, field: str, text: str) -> GrammarSource:
    if not text.strip():
        raise InvalidParameter(f"{field} is empty", param=field)
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidParameter(f"{field} may have at most {MAX_GRAMMAR_BYTES} bytes, got {num_bytes}", param=field)
    if "\0" in text or not _is_unicode(text):
        raise InvalidParameter(f"{field} contains an invalid character (NUL, or an unpaired surrogate)", param=field)
    return GrammarSource(kind, text, field)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
