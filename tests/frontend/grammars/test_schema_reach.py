"""Schemas as Pydantic, Zod and OpenAPI tools write them: enforced as far as a grammar can, else checked at the end."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.exchange.exchange import WARNING_HEADER
from penstock.parts.grammars.child.read import read_grammar
from tests.e2e.checkpoints import make_checkpoint
from tests.frontend.http_client import chat, complete, events, get, post
from tests.frontend.live_server import LiveServer
from tests.parts.grammars.schema_suite import DRAFTS, Case, Judge, cases_of

SUITE = os.environ.get("PENSTOCK_SCHEMA_SUITE", "")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    folder = tmp_path_factory.mktemp("checkpoints") / "bytes"
    make_checkpoint(folder)
    return Judge(folder)


STRING: dict[str, Any] = {"type": "string"}
TAGGED: dict[str, Any] = {"properties": {"kind": {"const": "a"}, "x": STRING}, "required": ["kind"]}

ENFORCED = [
    Case("annotations", {"type": "string", "format": "password"}, [("any", True), (1, False)]),
    Case("unknown format", {"type": "string", "format": "no such"}, [("any", True)]),
    *(
        Case(name, {"type": "string", "format": name}, [("any", True), (1, False)])
        for name in ("byte", "binary", "path", "uri-reference", "regex", "json-pointer")
    ),
    Case("no unique items asked for", {"type": "array", "uniqueItems": False}, [([1, 1], True)]),
    Case("z.record", {"type": "object", "propertyNames": STRING, "additionalProperties": STRING}, [({"a": "b"}, True)]),
    Case("openapi", {"type": "integer", "format": "int64", "nullable": True, "example": 3, "xml": {}}, [(5, True)]),
    Case("if alone", {"if": STRING}, [(5, True)]),
    Case("nothing unevaluated is refused", {"type": "object", "unevaluatedProperties": {}}, [({"a": 1}, True)]),
    Case("decimal counts", {"type": "string", "maxLength": 2.0}, [("ab", True), ("abc", False)]),
    Case("powers of ten", {"type": "integer", "multipleOf": 1_000_000}, [(3_000_000, True), (5, False)]),
    Case("anything", True, [(5, True), ([None], True)]),
    *(
        Case(f"no quotes in {pattern}", {"type": "string", "pattern": f"^{pattern}$"}, [("a b", True), ('"', False)])
        for pattern in ('[^"]*', r"[^\x22]*", r"[^\u0022\[\]]*", "[^!-/]*", r"[\x00-!#-~]*", '[^"&&[^x]]*', r"\P{P}*")
    ),
    Case("no backslashes", {"type": "string", "pattern": r"^[^\\/]+$"}, [('a"\n\x01', True), ("\\", False)]),
    Case("neither", {"type": "string", "pattern": r'^[^"\\]+$'}, [("a\n", True), ("\\", False), ('"', False)]),
    Case(
        "no quotes in names",
        {"type": "object", "patternProperties": {'^[^"]+$': {}}, "additionalProperties": False},
        [({"a": 1}, True), ({'"': 1}, False)],
    ),
    Case("ordinary divisors", {"type": "integer", "multipleOf": 3600}, [(7200, True), (5, False)]),
]
CHECKED = [
    Case("unique items", {"type": "array", "uniqueItems": True}, [([1, 2], True), ([1, 1], False)]),
    Case("not", {"type": "integer", "not": {"const": 3}}, [(4, True), (3, False)]),
    Case(
        "if, then and else",
        {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
        [({"a": 1, "b": 2}, True), ({"a": 1}, False), ({"a": 2, "c": 1}, True)],
    ),
    Case("contains", {"type": "array", "contains": STRING, "minContains": 2}, [(["a", "b"], True), (["a"], False)]),
    Case("names", {"type": "object", "propertyNames": {"pattern": "^a"}}, [({"ab": 1}, True), ({"b": 1}, False)]),
    Case("dependent", {"type": "object", "dependentRequired": {"a": ["b"]}}, [({"b": 1}, True), ({"a": 1}, False)]),
    Case(
        "unevaluated",
        {"allOf": [{"properties": {"a": STRING}}], "unevaluatedProperties": False},
        [({"a": "x"}, True), ({"b": 1}, False)],
    ),
    Case("one of", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [(1, True), (2.5, True), (3, False)]),
    Case("tagged", {"oneOf": [TAGGED, {"required": ["kind"]}]}, [({"kind": "b"}, True), ({"kind": "a"}, False)]),
    Case("look-ahead", {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}, [("a1", True), ("ab", False)]),
    Case("words", {"type": "string", "pattern": r"\bfoo\b"}, [("a foo", True), ("food", False)]),
    Case(
        "overlapping patterns",
        {"patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 5}}, "additionalProperties": False},
        [({"ab": 5}, True), ({"ab": 4}, False), ({"c": 4}, False)],
    ),
    Case("fewest of optional ones", {"properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "type": "object"},
         [({"a": 1, "b": 1}, True), ({"a": 1}, False)]),
    Case("large divisors", {"type": "integer", "multipleOf": 999_983}, [(999_983, True), (5, False)]),
    Case("recursive", {"$id": "http://x/tree", "$dynamicAnchor": "n", "type": "object",
                       "properties": {"next": {"$dynamicRef": "#n"}}}, [({"next": {}}, True), ({"next": 1}, False)]),
]  # fmt: skip


@pytest.mark.parametrize("case", ENFORCED, ids=lambda case: case.name)
def test_enforced_while_it_is_written(judge: Judge, case: Case) -> None:
    assert judge.verdict(case) == ("enforced", "")


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.name)
def test_checked_at_the_end(judge: Judge, case: Case) -> None:
    verdict, why = judge.verdict(case)
    assert (verdict, "is not enforced" in why) == ("checked", True), why


@pytest.mark.skipif(not SUITE, reason="PENSTOCK_SCHEMA_SUITE names no checkout of the JSON Schema Test Suite")
@pytest.mark.parametrize("draft", DRAFTS)
def test_nine_of_ten_schemas_of_the_suite_are_honoured(judge: Judge, draft: str) -> None:
    verdicts = [judge.verdict(case)[0] for case in cases_of(Path(SUITE), draft)]
    assert sum(verdict in ("enforced", "checked") for verdict in verdicts) >= 0.9 * len(verdicts)


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "object", "required": ["a", "b"], "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}}, 16),
        ({"type": "array", "items": {"enum": [1]}, "minItems": 3, "maxItems": 3}, 9),
    ],
)
def test_no_more_than_one_blank_stands_between_marks(judge: Judge, schema: Any, longest: int) -> None:
    grammar = read_grammar(judge.vocabulary, "json", json.dumps(schema)).text
    value = {"a": 1, "b": 2} if schema["type"] == "object" else [1, 1, 1]
    for text, may in [
        (json.dumps(value), True),
        (json.dumps(value, separators=(",", ":")), True),
        (json.dumps(value, indent=2), False),
        (json.dumps(value, separators=(",  ", ":")), False),
    ]:
        assert judge.can_be_typed(grammar, text) is may, text
    assert len(json.dumps(value)) <= longest


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


@pytest.mark.parametrize("said", ["[1, 2]", "[1, 1]"])
def test_the_client_is_told(live: LiveServer, said: str) -> None:
    live.says(said)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": UNIQUE}}
    for answer in (chat(live, response_format=form), complete(live, response_format=form)):
        assert answer.status == 200
        warning = answer.headers[WARNING_HEADER]
        assert "response_format.json_schema.schema: uniqueItems is not enforced while the text is written" in warning
        [choice] = answer.json()["choices"]
        assert ("schema_error" in choice) == ("schema_error: $" in warning) == (said == "[1, 1]")
        if said == "[1, 1]":
            assert "non-unique" in choice["schema_error"]


@pytest.mark.parametrize("said", ["[1, 2]", "[1, 1]"])
@pytest.mark.parametrize("send", [chat, complete])
def test_a_stream_is_checked_too(live: LiveServer, said: str, send: Any) -> None:
    live.says(said)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": UNIQUE}}
    answer = send(live, response_format=form, stream=True, n=2)
    assert "uniqueItems is not enforced" in answer.headers[WARNING_HEADER]
    choices = [choice for event in events(answer)[:-1] for choice in event["choices"]]
    told = [choice for choice in choices if "schema_error" in choice]
    assert [choice["index"] for choice in told] == ([0, 1] if said == "[1, 1]" else [])
    assert all("non-unique" in choice["schema_error"] for choice in told)
    assert sum(choice["finish_reason"] == "stop" for choice in choices) == 2


@pytest.mark.parametrize("said", ["[1, 2]", "[1, 1]"])
def test_a_response_is_checked_too(live: LiveServer, said: str) -> None:
    live.says(said)
    body = {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "n", "schema": UNIQUE}}}
    whole = post(live, "/v1/responses", body).json()
    streamed = post(live, "/v1/responses", body | {"stream": True})
    assert "uniqueItems is not enforced" in streamed.headers[WARNING_HEADER]
    last = json.loads(streamed.text.rpartition("data: ")[2])
    assert last["type"] == "response.completed"
    for response in (whole, last["response"], get(live, f"/v1/responses/{whole['id']}").json()):
        assert ("non-unique" in response.get("schema_error", "")) == (said == "[1, 1]")


def test_unknown_fields_are_told(live: LiveServer) -> None:
    answer = chat(live, frobnicate=1, temperature=0.5, **{"nonsense\r\nX-Evil: 1": {}})
    assert answer.status == 200
    assert (
        answer.headers[WARNING_HEADER]
        == "frobnicate: an unknown field, ignored; nonsense  X-Evil: 1: an unknown field, ignored"
    )
    assert WARNING_HEADER not in chat(live).headers
