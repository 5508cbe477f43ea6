"""Schemas of the whole dialect, and texts at random that a grammar allows."""

import json
import random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from penstock.models.grammar_tokens import make_matcher
from penstock.parts.grammars.child.json_check import mismatch
from penstock.parts.grammars.child.json_schema import GrammarError
from penstock.parts.grammars.child.read import read_grammar

Schema = dict[str, Any]

MAX_TOKENS = 400
NUM_TEXTS = 4


class Writer:
    """Writes texts at random that a grammar allows."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self.vocabulary = vocabulary
        marks = (vocabulary.tokenize_str(mark) for mark in '"{}[],:.-0123456789')
        self._marks = np.array([ids[0] for ids in marks if len(ids) == 1])

    def write(self, grammar: str, seed: int) -> str | None:
        """A text, or None if it has no end within `MAX_TOKENS`."""
        matcher = make_matcher(self.vocabulary, grammar)
        draw = random.Random(seed)
        output: list[int] = []
        while len(output) < MAX_TOKENS:
            if matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.3):
                return self._text(output)
            allowed = self._allowed(matcher)
            assert allowed.any(), (self._text(output), matcher.get_error())
            marks = self._marks[allowed[self._marks]]
            token_id = int(draw.choice(marks if len(marks) and draw.random() < 0.7 else allowed.nonzero()[0]))
            if token_id in self.vocabulary.eos_tokens:
                return self._text(output)
            assert matcher.consume_token(token_id), matcher.get_error()
            output.append(token_id)
        return None

    def check(self, schema: Schema, seed: int) -> int:
        """Write texts under a schema: those that end must be valid; their number. A schema may be refused."""
        try:
            read = read_grammar(self.vocabulary, "json", json.dumps(schema))
        except GrammarError:
            return 0
        num_ended = 0
        for i in range(NUM_TEXTS):
            text = self.write(read.text, seed + i)
            num_ended += text is not None
            if text is not None and not read.not_enforced:
                assert mismatch(json.dumps(schema), text) == "", text
        return num_ended

    def _allowed(self, matcher: LLMatcher) -> NDArray[np.bool_]:
        """[bits of the mask] bool: which tokens may follow; none after an error."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").astype(bool)
        return np.zeros_like(bits) if matcher.is_error() else bits

    def _text(self, token_ids: list[int]) -> str:
        return self.vocabulary.decode_bytes(token_ids).decode()


_INTEGERS = st.one_of(
    st.integers(-20, 20), st.sampled_from([-(2**63), 2**63 - 1, 2**64 - 1, 2**53 + 1, 10**20, -(10**20), 10**6])
)
_DECIMALS = st.one_of(
    _INTEGERS,
    st.decimals(-100, 100, places=2).map(float),
    st.sampled_from([0.29, 0.3, 1e-12, -3.4028234663852886e38, 1.7976931348623157e308, 1.17549435e-38, 99.99, 1e15]),
)
_NAMES = st.sampled_from(["a", "b", "name", "two words", "ünï", 'q"', "x_1"])
_PATTERNS = st.sampled_from(
    ["^[a-c]{1,4}$", "^[0-9]{3}-[0-9]{2}$", "^(red|green)$", "x", "^a", "b$", "(?=a)b", r"\bx\b", "^$", r"^\d+$"]
)
_FORMATS = st.sampled_from(
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "byte"]
)
_VALUES = st.sampled_from(["a", "b", 'quote "q"', "", 0, 1, 1.0, -7, 3.5, 0.29, True, False, None, [1, "x"], {"a": 1}])
_COUNTS = st.one_of(st.integers(0, 4), st.sampled_from([18446744073709551615, 2.0]))


def _some(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return st.fixed_dictionaries({}, optional=members)


def _of_type(kind: Any, keywords: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return keywords.map(lambda found: {"type": kind, **found})


_NUMERIC = {
    "minimum": _DECIMALS,
    "maximum": _DECIMALS,
    "exclusiveMinimum": _DECIMALS,
    "exclusiveMaximum": _DECIMALS,
    "multipleOf": st.sampled_from([1, 2, 5, 7, 0.01, 0.1, 0.5, 0.07, 0.29, 1000, 3600, 999983, 1e-7, 2.5]),
}
_STRINGS = {"minLength": _COUNTS, "maxLength": _COUNTS, "pattern": _PATTERNS, "format": _FORMATS}
_LEAVES = st.one_of(
    _of_type("integer", _some(**_NUMERIC)),
    _of_type("number", _some(**_NUMERIC)),
    _of_type(["number", "null"], _some(**_NUMERIC)),
    _of_type("string", _some(**_STRINGS)),
    _of_type(["string", "integer"], _some(**_STRINGS, **_NUMERIC)),
    _some(**_NUMERIC, **_STRINGS),
    st.builds(
        lambda values, rest: {"enum": values, **rest}, st.lists(_VALUES, min_size=1, max_size=4), _some(**_NUMERIC)
    ),
    st.builds(lambda value: {"const": value}, _VALUES),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["boolean", "null", ["boolean", "null"]])),
    st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from(["d", "e"])),
)


def _nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    members = st.dictionaries(_NAMES, inner, max_size=3)
    parts = st.lists(inner, min_size=1, max_size=3)
    objects = _some(
        properties=members,
        required=st.lists(_NAMES, max_size=2, unique=True),
        additionalProperties=st.one_of(st.booleans(), inner),
        patternProperties=st.dictionaries(_PATTERNS.filter(lambda pattern: "?" not in pattern), inner, max_size=2),
        minProperties=st.integers(0, 3),
        maxProperties=st.integers(0, 3),
    )
    arrays = _some(
        items=inner,
        prefixItems=parts,
        minItems=st.integers(0, 2),
        maxItems=st.integers(0, 3),
        uniqueItems=st.booleans(),
    )
    combined = _some(allOf=parts, anyOf=parts, oneOf=parts)
    return st.one_of(
        _of_type("object", objects),
        _of_type("array", arrays),
        combined,
        st.builds(lambda one, other: one | other, _of_type("object", objects), combined),
        st.builds(lambda one, other: one | other, _LEAVES, combined),
    )


SCHEMAS = st.builds(
    lambda schema, d, e: {**schema, "$defs": {"d": d, "e": e}},
    st.recursive(_LEAVES, _nested, max_leaves=6),
    st.recursive(_LEAVES, _nested, max_leaves=3),
    _LEAVES.filter(lambda schema: "$ref" not in schema),
)
