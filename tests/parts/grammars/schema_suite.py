"""The JSON Schema Test Suite's cases, held against the grammars and the check at the end.

    PENSTOCK_SCHEMA_SUITE=FOLDER python -m tests.parts.grammars.schema_suite

prints the table of docs/structured-output.md.

FOLDER is a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite. A schema is honoured if every instance that
the suite calls valid can be written, in some order of its properties and some spelling of its numbers, and every
invalid one either cannot be written or is found at the end.
"""

import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from penstock.models.finding.registry import open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary, make_matcher
from penstock.parts.grammars.child.json_check import mismatch
from penstock.parts.grammars.child.json_schema import GrammarError
from penstock.parts.grammars.child.read import read_grammar
from tests.e2e.checkpoints import make_checkpoint

if TYPE_CHECKING:
    from llguidance import LLTokenizer

DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
MAX_KEYS = 5
"""Objects with more are tried in one order only."""


class Case(NamedTuple):
    """A schema with its instances, each with whether it is valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


def cases_of(folder: Path, draft: str) -> Iterator[Case]:
    for file in sorted((folder / "tests" / draft).glob("*.json")):
        for group in json.loads(file.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            instances = [(test["data"], test["valid"]) for test in group["tests"]]
            yield Case(f"{file.stem}: {group['description']}", schema, instances)


def spellings(value: Any) -> Iterator[str]:
    """The JSON texts that mean a value: objects in each order of their keys, whole numbers with and without a point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        yield str(int(value))
        yield repr(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield str(value)
        yield f"{value}.0"
    elif isinstance(value, list):
        for items in itertools.islice(itertools.product(*(list(spellings(item)) for item in value)), 200):
            yield f"[{', '.join(items)}]"
    elif isinstance(value, dict):
        orders = itertools.permutations(value) if len(value) <= MAX_KEYS else iter([tuple(value)])
        for keys in orders:
            parts = [
                [f"{json.dumps(key, ensure_ascii=False)}: {text}" for text in spellings(value[key])] for key in keys
            ]
            for members in itertools.islice(itertools.product(*parts), 50):
                yield "{" + ", ".join(members) + "}"
    else:
        yield json.dumps(value, ensure_ascii=False)


class Judge:
    """Reads schemas for a tokenizer of one token per byte."""

    def __init__(self, folder: Path) -> None:
        self.vocabulary: LLTokenizer = grammar_vocabulary(open_checkpoint(folder))
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def can_be_written(self, grammar: str, value: Any) -> bool:
        return any(self.can_be_typed(grammar, text) for text in itertools.islice(spellings(value), 500))

    def can_be_typed(self, grammar: str, text: str) -> bool:
        matcher = make_matcher(self.vocabulary, grammar)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def next_tokens(self, grammar: str, text: str) -> set[str]:
        """What may follow a text."""
        matcher = make_matcher(self.vocabulary, grammar)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        assert matcher.try_consume_tokens(ids) == len(ids)
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        return {
            self._tokenizer.decode([8 * i + bit]) for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
        }

    def verdict(self, case: Case) -> tuple[str, str]:
        """`enforced`, `checked` (some of it at the end only), `refused`, or `wrong`; and why."""
        schema = json.dumps(case.schema)
        try:
            read = read_grammar(self.vocabulary, "json", schema, open_objects=True)
        except GrammarError as error:
            # Nothing matches it: there is nothing that could be written.
            return ("enforced" if not any(valid for _, valid in case.instances) else "refused"), str(error)
        for value, valid in case.instances:
            passes = self.can_be_written(read.text, value)
            if passes and not valid and read.not_enforced and mismatch(schema, json.dumps(value)):
                passes = False
            if passes != valid:
                return "wrong", f"{json.dumps(value)} is {'valid' if valid else 'invalid'}"
        return ("checked" if read.not_enforced else "enforced"), "; ".join(read.not_enforced)


def main() -> int:
    suite = Path(os.environ["PENSTOCK_SCHEMA_SUITE"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "bytes"
        make_checkpoint(folder)
        judge = Judge(folder)
        print("| draft | schemas | enforced | checked at the end | refused | not honoured | honoured |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for draft in DRAFTS:
            counts: Counter[str] = Counter()
            for case in cases_of(suite, draft):
                verdict, why = judge.verdict(case)
                counts[verdict] += 1
                if verdict in ("wrong", "refused"):
                    print(f"{verdict} {draft} {case.name}: {why}", file=sys.stderr)
            total, good = counts.total(), counts["enforced"] + counts["checked"]
            numbers = [total, counts["enforced"], counts["checked"], counts["refused"], counts["wrong"]]
            print(f"| {draft} | {' | '.join(map(str, numbers))} | {good / total:.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
