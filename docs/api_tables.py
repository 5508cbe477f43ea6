"""Writes tables of `api.md` from the code: error codes, limits of requests, fields of other engines' clients.

python -m docs.api_tables            # write them
python -m docs.api_tables --check    # exit 1 if they are not what would be written
"""

import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import penstock.frontend.http.routes  # noqa: F401  (brings all kinds of errors)
from docs.written_parts import with_parts, write_or_check
from penstock.frontend.errors import ApiError
from penstock.frontend.validation.foreign_fields import FOREIGN_FIELDS, OF_SAMPLERS, SYNONYMS, ForeignField

PAGE = Path(__file__).parent / "api.md"
_BEGIN = "<!-- The table of {} is written by docs/api_tables.py: run `make docs` after a change. -->\n"
_ROOT = Path(__file__).parent.parent
_OPTION = re.compile(r"(?<![`\w])(--[a-z][a-z-]*)")

LIMITS: Mapping[str, str] = {
    "json_size.MAX_VALUES": "lists, objects and strings in a body, names of fields included",
    "json_size.MAX_PLAIN_VALUES": "numbers, `true`, `false` and `null` in a body",
    "json_size.MAX_DEPTH": "levels of lists and objects in a body",
    "json_size.MAX_DIGITS": "digits of a number",
    "json_size.MAX_EXPONENTS": "numbers with an exponent in a body",
    "json_size.MAX_ESCAPES": "backslashes in the strings of a body",
    "validation.common.MAX_BYTES_PER_TOKEN": "bytes of a text for each token of the context length",
    "validation.chat.MAX_MESSAGES": "messages",
    "validation.chat.MAX_TOOL_CALLS": "calls in one message",
    "validation.chat.MAX_ARGUMENT_NUMBERS": "numbers in the arguments of all past calls",
    "validation.chat.MAX_TEMPLATE_VARIABLES": "entries of `chat_template_kwargs`",
    "validation.tools.MAX_TOOLS": "tools",
    "validation.tools.MAX_NAME_CHARACTERS": "characters in a tool's name",
    "parts.grammars.frontend.custom_patterns.MAX_LARK": "characters in the Lark grammars of custom tools, if enforced",
    "validation.common.MAX_STOP_STRINGS": "stop strings",
    "validation.common.MAX_STOP_CHARACTERS": "characters in all stop strings together",
    "validation.common.MAX_STOP_TOKEN_IDS": "`stop_token_ids`",
    "validation.common.MAX_LOGIT_BIAS": "entries of `logit_bias`",
    "validation.tokens.MAX_ALLOWED_TOKEN_IDS": "`allowed_token_ids`",
    "validation.samplers.MAX_ORDER": "samplers in a list of their order",
    "validation.samplers.MAX_PROCESSORS": "`logits_processors`",
    "validation.samplers.MAX_PROCESSOR_BYTES": "bytes of one's arguments",
    "validation.samplers.MAX_SAMPLER_TEXTS": "`dry_sequence_breakers`",
    "validation.samplers.MAX_SAMPLER_TEXT_CHARACTERS": "characters in one of them",
    "validation.tokens.MAX_BAD_WORDS": "`bad_words`",
    "validation.tokens.MAX_BAD_WORD_CHARACTERS": "characters in a bad word",
    "validation.common.MAX_LOGPROBS": "best tokens in log-probabilities",
    "api.run.MAX_PROMPT_LOGPROBS": "log-probabilities of prompts in one answer",
    "api.completions.MAX_TOLD_TOKENS": "prompt tokens in one answer, with `echo` and `return_token_ids`",
    "validation.common.MAX_DRAFTS": "`num_speculative_tokens`",
    "validation.common.MAX_CACHE_SALT": "characters in `cache_salt`",
    "targets.MAX_MS": "milliseconds in `slo_ttft_ms` and `slo_tpot_ms`",
    "validation.grammar.MAX_GRAMMAR_BYTES": "bytes of a JSON schema, pattern or grammar; of all strict tools' schemas",
    "validation.grammar.MAX_CHOICES": "choices of structured output",
    "parts.grammars.child.json_schema.MAX_DEPTH": "levels of a JSON schema",
    "parts.grammars.child.json_schema.MAX_VALUES": "values of a JSON schema",
    "parts.grammars.limits.MAX_PATTERN_CHARACTERS": "characters in a pattern",
    "parts.grammars.child.json_schema.MAX_PATTERN_REPEATS": "repetitions in a pattern",
    "api.infill.MAX_EXTRAS": "texts in `input_extra`",
    "embeddings.validate.MAX_INPUTS": "texts in one request for embeddings",
    "parts.responses.frontend.items.MAX_ITEMS": "items in a response's input",
    "parts.responses.frontend.items.MAX_REFERENCES": "references to items in a response's input",
    "parts.responses.frontend.conversations.MAX_ADDED": "items that are added to a conversation at a time",
    "parts.responses.frontend.stored.MAX_PAGE": "stored items in one page of a list",
    "parts.responses.frontend.validate.MAX_METADATA": "entries of a response's `metadata`",
    "parts.responses.frontend.validate.MAX_METADATA_KEY": "characters in a key of `metadata`",
    "parts.responses.frontend.validate.MAX_METADATA_VALUE": "characters in a value of `metadata`",
    "parts.responses.frontend.validate.MAX_IDENTIFIER": "characters in `safety_identifier` and `prompt_cache_key`",
    "parts.batches.frontend.lines.MAX_LINES": "requests in a batch",
    "parts.batches.frontend.store.MAX_LIVE": "batches of an API key that are under way",
    "parts.batches.frontend.files.handlers.MAX_PAGE": "files in one page of the list",
    "parts.images.frontend.fetch.MAX_ADDRESS": "characters in an image's address",
    "parts.images.frontend.fetch.MAX_REDIRECTS": "redirects to an image",
    "http.connections.MAX_HEADER_FIELDS": "header fields of a request",
    "http.connections.MAX_HEADER_BYTES": "bytes of a header field, and of the request line",
    "http.app.MAX_TYPE_LENGTH": "characters in `Content-Type`",
    "http.connections.MAX_CONNECTIONS": "open connections to a frontend, if its limit of open files allows them",
    "parts.responses.frontend.storage.responses.MAX_STORED": "stored responses of an API key; as many conversations",
}
"""What constants limit, in the order of the table: those of the frontend, and of parts."""

_INSIDE = frozenset(
    (
        "api.service.MAX_RENDER_SECONDS",
        "api.service.MAX_ENCODE_SECONDS",
        "api.service.MAX_QUICK",
        "parts.batches.frontend.lines.MAX_ERRORS",
        "parts.batches.frontend.runner.MAX_OPEN",
        "parts.batches.frontend.sender.MAX_WAITING",
        "parts.batches.frontend.handlers.MAX_PAGE",
        "parts.batches.frontend.shapes.MAX_METADATA",
        "parts.images.frontend.reader.MAX_READ_SECONDS",
        "http.app.MAX_HELD_BODIES",
        "http.proxies.MAX_HOPS",
    )
)
"""Constants that limit what the server does, not what a request may hold, or that are others' values again."""

_OF_REQUESTS = (
    *(f"frontend/{room}" for room in ("validation", "embeddings", "api", "http")),
    *("parts/images/frontend", "parts/responses/frontend", "parts/batches/frontend"),
)
_FILES_OF_REQUESTS = (
    *("frontend/json_size.py", "frontend/targets.py"),
    *("parts/grammars/frontend/custom_patterns.py", "parts/grammars/limits.py", "parts/grammars/child/json_schema.py"),
)
_CONSTANT = re.compile(r"^(MAX_[A-Z_]+)\b.* = ", re.MULTILINE)


def _kinds(of: type[ApiError] = ApiError) -> Iterator[type[ApiError]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _when(kind: type[ApiError]) -> str:
    first = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
    return _with_code(first)


def _with_code(text: str) -> str:
    return _OPTION.sub(r"`\1`", text)


def _retry(kind: type[ApiError]) -> str:
    if kind.status == 429 or kind.status == 503:
        return "later"
    return "yes" if kind.status >= 500 and kind.status != 501 and kind.may_retry else "no"


def errors() -> str:
    """The table of error codes as Markdown."""
    rows = ["| status | `code` | when | retry |", "| --- | --- | --- | --- |"]
    found: dict[tuple[int, str], list[type[ApiError]]] = {}
    for kind in _kinds():
        found.setdefault((kind.status, kind.code), []).append(kind)
    for (status, code), kinds in sorted(found.items()):
        when = " ".join(dict.fromkeys(map(_when, kinds)))
        rows.append(f"| {status} | `{code}` | {when} | {_retry(kinds[0])} |")
    return "\n".join(rows) + "\n"


def _constants() -> Iterator[str]:
    """The limits in the code, by module and name."""
    paths = [path for room in _OF_REQUESTS for path in sorted((_ROOT / room).rglob("*.py"))]
    for path in [*paths, *(_ROOT / name for name in _FILES_OF_REQUESTS)]:
        module = ".".join(path.relative_to(_ROOT).with_suffix("").parts).removeprefix("frontend.")
        yield from (f"{module}.{name}" for name in _CONSTANT.findall(path.read_text()))


def limits() -> str:
    """The table of limits as Markdown.

    Raises:
        ValueError: a limit in the code is in no list here.
    """
    if missing := sorted({*_constants()} - {*LIMITS} - _INSIDE):
        raise ValueError(f"docs/api_tables.py: say in LIMITS what these limit: {', '.join(missing)}")
    rows = ["| at most | of |", "| --- | --- |"]
    for name, what in LIMITS.items():
        module, _, constant = name.rpartition(".")
        module = module if module.startswith("parts.") else f"frontend.{module}"
        rows.append(f"| {getattr(import_module(f'penstock.{module}'), constant):,.0f} | {what} |")
    return "\n".join(rows) + "\n"


def foreign_fields() -> str:
    """The table of other engines' fields as Markdown."""
    rows = ["| field | here |", "| --- | --- |"]
    told = {name: field for name, field in FOREIGN_FIELDS.items() if field is not OF_SAMPLERS}
    for group in SYNONYMS:
        if told.keys().isdisjoint(group):
            rows.append(f"| {_listed(group)} | one parameter |")
    names: dict[ForeignField, list[str]] = {}
    for name, field in told.items():
        key = field._replace(same=tuple(map(repr, field.same)))  # lists cannot be keys
        names.setdefault(key, []).append(name)
    rows += [f"| {_listed(same)} | {_here(field)} |" for field, same in names.items()]
    return "\n".join(rows) + "\n"


def _here(field: ForeignField) -> str:
    if field.depends:
        return "no effect without what they belong to"
    values = [_json(value) for value in field.same if value != "False" or not field.hint]
    accepted = f"{_listed(values)} accepted" if values else ""
    if field.hint:
        others = f"no effect: {_with_code(field.hint)}"
        return f"{accepted}; else {others}" if accepted else others
    refused = "refused" + (f"; use {_with_code(field.use)}" if field.use else "")
    return f"{accepted}, else {refused}"


def _json(shown: str) -> str:
    return {"True": "true", "False": "false", "'auto'": '"auto"'}.get(shown, shown.replace("'", '"'))


def _listed(words: object) -> str:
    assert isinstance(words, list | tuple)
    return ", ".join(f"`{word}`" for word in words)


def page() -> str:
    """The whole page, with the tables that belong there."""
    parts = {"errors": errors(), "limits": limits(), "other engines' fields": foreign_fields()}
    return with_parts(PAGE, {_BEGIN.format(what): f"\n{table}\n" for what, table in parts.items()})


def main() -> int:
    """Write the tables, or check them; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
