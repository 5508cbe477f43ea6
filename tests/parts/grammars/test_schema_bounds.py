"""What a schema's grammar allows, to the last digit: numbers, formats, objects, arrays; fallbacks that stay local."""

import json
from typing import Any

import pytest

from penstock.parts.grammars.child.json_check import mismatch
from penstock.parts.grammars.child.read import read_grammar
from tests.e2e.checkpoints import make_checkpoint
from tests.parts.grammars.schema_suite import Judge

NUMBER = {"type": "number"}
INTEGER = {"type": "integer"}
LISTED = {"type": "object", "properties": {"a": INTEGER}}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("checkpoints") / "bytes"
    make_checkpoint(folder)
    return Judge(folder)


def _distinct(num_values: int, **fields: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"enum": [f"v{i}" for i in range(num_values)]}, "uniqueItems": True, **fields}


def _texts(kind: str) -> dict[str, Any]:
    return {"type": "string", "format": kind}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (INTEGER, ["-" + "1" * 19, "0"], ["1" * 20]),
        (NUMBER, ["1234567890123456.123456789", "-0.5"], ["0.1234567891", "12345678901234567"]),
        (NUMBER | {"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5", "0.000000001"], ["0", "1", "0.0000000001"]),
        (INTEGER | {"minimum": -(2**63), "maximum": 2**63 - 1}, ["5", "-7"], ["0.5"]),
        (INTEGER | {"minimum": 0, "maximum": 2**64 - 1}, ["5"], ["-1"]),
        (NUMBER | {"minimum": -3.4028234663852886e38, "maximum": 1.7976931348623157e308}, ["0.5", "-7"], ['"a"']),
        (NUMBER | {"minimum": 1.17549435e-38}, ["0.5"], ["0", "-1"]),
        ({"type": "string", "maxLength": 2**64 - 1}, ['"a"'], ["1"]),
        (NUMBER | {"multipleOf": 0.01, "minimum": 0.29, "maximum": 0.29}, ["0.29"], ["0.28", "0.3"]),
        (NUMBER | {"multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}, ["0.3"], ["0.2"]),
        (NUMBER | {"multipleOf": 0.1, "minimum": 0.25, "maximum": 0.35}, ["0.3"], ["0.25", "0.2"]),
        (NUMBER | {"multipleOf": 0.07}, ["0.07", "0.14", "7"], ["0.15"]),
        ({"type": ["number", "null"], "multipleOf": 0.5, "minimum": 0, "maximum": 2}, ["null", "1.5"], ["1.25", "2.5"]),
        ({"enum": [1, 2.5, "a", None], "type": ["integer", "null"]}, ["1", "null"], ["2.5", '"a"']),
        (_texts("email"), ['"a.b@c.org"', '"' + "a" * 64 + '@b"'], ['"' + "a" * 65 + '@b"']),
        (_texts("date"), ['"2024-02-29"', '"2023-12-31"'], ['"2023-02-29"', '"1900-02-29"']),
        (_texts("time"), ['"12:30:00.123456789Z"'], ['"12:30:00.1234567891Z"']),
        (_texts("duration"), ['"P1DT2H"', '"P3W"'], ['"P1234567890D"', '"P"']),
        (_texts("uri"), ['"https://example.org/a?b=c#d"', '"mailto:a@b"'], ['"x:/' + "a" * 300 + '"']),
        (_texts("date") | {"pattern": "^2"}, ['"2024-02-29"'], ['"1999-01-01"', '"2"']),
        (LISTED, ['{"a": 1}', "{}"], ['{"b": 1}']),
        (LISTED | {"additionalProperties": True}, ['{"a": 1, "b": 1}'], []),
        (LISTED | {"required": ["b"]}, ['{"a": 1, "b": [1]}'], ['{"b": 1, "c": 1}']),
        ({"allOf": [LISTED, {"properties": {"b": INTEGER}}]}, ['{"a": 1, "b": 2}'], ['{"a": 1, "c": 2}']),
        ({"$ref": "#/$defs/x", "$defs": {"x": LISTED}}, ['{"a": 1}'], ['{"b": 1}']),
        (
            {"allOf": [{"$ref": "#/$defs/x"}], "properties": {"b": INTEGER}, "type": "object", "$defs": {"x": LISTED}},
            ['{"a": 1, "b": 2}'],
            ['{"c": 1}'],
        ),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, ['{"x1": 1, "b": "c"}'], ['{"x1": "c"}']),
        (
            {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
            ['["c", "a"]', "[]"],
            ['["a", "a"]'],
        ),
        (
            {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
            ["[true, false]"],
            ["[]"],
        ),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[7]"], ["[7, 7]"]),
        (_distinct(6), ['["v5", "v0", "v3", "v1", "v2", "v4"]', "[]"], ['["v5", "v0", "v5"]']),
        (_distinct(12, maxItems=3), ['["v11", "v0", "v7"]'], ['["v11", "v11"]']),
        ({"type": "object"}, ['{"a": [1.5, {"b": null}]}'], ['{"a": 123456789012345678901234}']),
    ],
    ids=lambda value: str(value)[:70],
)
def test_enforced_to_the_last_digit(judge: Judge, schema: Any, allowed: list[str], refused: list[str]) -> None:
    read = read_grammar(judge.vocabulary, "json", json.dumps(schema))
    assert read.not_enforced == ()
    assert [text for text in allowed if not judge.can_be_typed(read.text, text)] == []
    assert [text for text in refused if judge.can_be_typed(read.text, text)] == []


def test_open_objects_are_an_option(judge: Judge) -> None:
    read = read_grammar(judge.vocabulary, "json", json.dumps(LISTED), open_objects=True)
    assert judge.can_be_typed(read.text, '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    "hard",
    [
        {"type": "string", "pattern": "[[:nope:"},
        {"type": "object", "patternProperties": {"a": INTEGER, "b": {"minimum": 5}}},
        {"type": "integer", "minimum": 2**70},
        {"type": "integer", "multipleOf": 999_983},
        {"const": 2**53 + 1},
        {"type": "object", "minProperties": 2},
    ],
    ids=str,
)
def test_a_fallback_leaves_the_other_fields_alone(judge: Judge, hard: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 9}, "hard": hard},
        "required": ["size"],
    }
    read = read_grammar(judge.vocabulary, "json", json.dumps(schema))
    assert read.not_enforced
    assert judge.can_be_typed(read.text, '{"size": 9}')
    for text in ('{"size": 10}', '{"size": "9"}', '{"other": 1}', "[]"):
        assert not judge.can_be_typed(read.text, text), text


def test_different_values_are_listed_as_far_as_there_is_room(judge: Judge) -> None:
    """In the fields that come first; the others keep all but this of their schemas."""
    schema = {"type": "object", "properties": {f"f{i}": _distinct(5) for i in range(60)}}
    read = read_grammar(judge.vocabulary, "json", json.dumps(schema))
    assert read.not_enforced == ("uniqueItems is not enforced while the text is written",)
    for text, allowed in (
        ('{"f0": ["v0", "v0"]}', False),
        ('{"f0": ["v0", "v4"], "f59": ["v0", "v0"]}', True),
        ('{"f59": ["v5"]}', False),
    ):
        assert judge.can_be_typed(read.text, text) == allowed
    long = _distinct(6) | {"items": {"enum": [str(i) * 1000 for i in range(6)]}}
    assert read_grammar(judge.vocabulary, "json", json.dumps(long)).not_enforced == read.not_enforced


def test_a_property_that_a_pattern_names_again_leads_nowhere_else(judge: Judge) -> None:
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer", "multipleOf": 5}},
        "patternProperties": {"^score$": {"type": "integer"}},
    }
    grammar = read_grammar(judge.vocabulary, "json", json.dumps(schema)).text
    assert judge.can_be_typed(grammar, '{"score": 5}')
    assert not judge.can_be_typed(grammar, '{"score": 6}')
    assert judge.next_tokens(grammar, '{"score": 5') <= set("0123456789}")


@pytest.mark.parametrize(
    ("schema", "text", "wrong"),
    [
        ({"multipleOf": 0.1}, "0.3", False),
        ({"multipleOf": 0.01}, "0.29", False),
        ({"multipleOf": 0.1}, "0.35", True),
        ({"type": "integer"}, "9.0", False),
        ({"minimum": 0.1}, "0.1", False),
        ({"multipleOf": 3}, "1e999", False),
        ({"type": "number"}, "1e99999999999999999999", False),
    ],
)
def test_the_check_at_the_end_is_exact(schema: Any, text: str, wrong: bool) -> None:
    assert bool(mismatch(json.dumps(schema), text)) is wrong


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"multipleOf": 7}, "1" + "0" * 500, False),
        ({"multipleOf": 10}, "1" + "0" * 500, True),
        ({"multipleOf": 2}, "1e399", True),
    ],
)
def test_the_check_of_long_numbers_ends(schema: dict[str, Any], text: str, fits: bool) -> None:
    assert (mismatch(json.dumps(schema), text) == "") is fits


def test_a_value_that_cannot_be_read_leaves_its_type(judge: Judge) -> None:
    read = read_grammar(judge.vocabulary, "json", json.dumps({"type": "integer", "const": 10**30}))
    assert len(read.not_enforced) == 1
    assert judge.can_be_typed(read.text, "12")
    assert not any(judge.can_be_typed(read.text, text) for text in ('"a"', "{}", "null"))
