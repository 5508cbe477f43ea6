"""Grammars in requests: what is read, what is refused and why; hostile ones harm nobody, and their process is gone."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.api.grammar_part import Grammar
from penstock.frontend.errors import InvalidRequest, Overloaded
from penstock.frontend.validation.grammar import GrammarSource
from penstock.ipc.messages import AddRequest
from penstock.parts.grammars.frontend.reader import MAX_CACHED, MAX_QUEUED, GrammarReader
from tests.frontend.http_client import chat, complete, error_of, post
from tests.frontend.live_server import LiveServer
from tests.processes import children_named

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SLOW = json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2400)}})
"""Within all limits, but it takes the better part of a second."""


def _grammars_sent(live: LiveServer) -> list[str]:
    return [message.sampling.grammar for message in live.scheduler.received if isinstance(message, AddRequest)]


ACCEPTED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
    {"structured_outputs": {"json": PERSON}},
    {"structured_outputs": {"json": json.dumps(PERSON)}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": "(a+)+b"}},
    {"structured_outputs": {"regex": "(.*){50}"}},
    {"structured_outputs": {"choice": ["yes", 'no "or" \\ö']}},
    {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}},
    {"guided_json": PERSON},
    {"guided_regex": "[a-z]+"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'root ::= "a"'},
    {"grammar": 'root ::= "a" | "b"'},
    {"json_schema": PERSON},
    {"regex": "a+"},
    {"ebnf": 'root ::= "a"'},
    {"response_format": {"type": "json_object", "schema": PERSON}},
    {"response_format": {"type": "json_schema", "schema": PERSON}},
    {"response_format": {"type": "regex", "pattern": "a+"}},
    {"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}},
    {"structured_outputs": {"json": {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#"}}}}}},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=lambda fields: str(fields)[:60])
def test_accepted(live: LiveServer, fields: dict[str, Any]) -> None:
    assert chat(live, **fields).status == 200
    assert complete(live, **fields).status == 200
    after_reasoning, alone = _grammars_sent(live)
    assert alone
    assert after_reasoning.startswith("start: ")
    assert '"<think>"' in after_reasoning


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None},
        {"structured_outputs": {"json_object": False, "regex": None}},
        {"grammar": "", "typical_p": 1, "mirostat": 0, "dry_multiplier": 0.0, "repeat_penalty": 1.0},
    ],
)
def test_nothing_asked_for(live: LiveServer, fields: dict[str, Any]) -> None:
    assert chat(live, **fields).status == 200
    assert _grammars_sent(live) == [""]


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _json(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema if isinstance(schema, str) else json.dumps(schema)}}


def _strict(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (_json({"$ref": "#"}), "refers to itself without end"),
    (_json({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}), "without end"),
    (_json({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}), "without end"),
    (_json({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "without end"),
    (_json({"anyOf": [{"$ref": "#"}]}), "without end"),
    (_json({"$ref": "http://169.254.169.254/latest"}), "only references within the schema"),
    (_json({"$ref": "file:///etc/passwd"}), "only references within the schema"),
    (_json({"$ref": "#/nowhere"}), "cannot be used"),
    (_json({"$ref": "#/x", "x": {"type": "string", "pattern": "((x{1000}){1000}){1000}"}}), "at most 10000 characters"),
    (_json(_nested(10_000)), "may have at most"),
    (_json(_nested(2000)), "nested too deeply"),
    ({"response_format": _strict(json.loads(_nested(100)))}, "64 levels"),
    (_json(_nested(80)), "at most 64 levels deep"),
    (_json({"enum": list(range(10_001))}), "at most 10000 values"),
    (_json({"enum": [f"value {i}" for i in range(100_000)]}), "at most 65536 bytes, got"),
    (_json({"type": "nope"}), "nope"),
    (_json({"properties": []}), "not a valid schema"),
    (_json({"type": "string", "minLength": -1}), "not a valid schema"),
    (_json({"anyOf": []}), "cannot be used"),
    ({"response_format": _strict({"type": "array", "uniqueItems": True})}, "uniqueItems is not enforced"),
    ({"response_format": _strict({"type": "string", "pattern": "(?=a)b"})}, "look-around"),
    (_json({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    (_json({"type": "object", "x-guidance": {"lenient": True}}), "x-guidance"),
    (_json({"type": "string", "pattern": "a{1,1000000000}"}), "at most 10000 characters"),
    (_json("[]"), "must be an object"),
    (_json('""'), "must be an object"),
    (_json("{"), "cannot be used"),
    ({"structured_outputs": {"json": ""}}, "is empty"),
    ({"structured_outputs": {"json": True}}, "json"),
    ({"structured_outputs": {"regex": "a" * 1_000_000}}, "at most 65536 bytes, got 1000000"),
    ({"structured_outputs": {"regex": "a" * 5000}}, "at most 4096 characters, got 5000"),
    ({"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}}, "got 1000000000"),
    ({"structured_outputs": {"regex": "(a{0000000000000999}){0000000000000999}"}}, "got 998001"),
    ({"structured_outputs": {"regex": "(?x)(a {99}) {999}"}}, "at most 10000 characters"),
    ({"structured_outputs": {"regex": "(?i-u:(?sx)(a{99})# comment\n{999})"}}, "at most 10000 characters"),
    ({"structured_outputs": {"regex": "(" * 2000 + ")" * 2000}}, "cannot be used"),
    ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
    ({"structured_outputs": {"regex": "a\u0000b"}}, "NUL"),
    ({"structured_outputs": {"choice": []}}, "at least one"),
    ({"structured_outputs": {"choice": [""]}}, "at least one"),
    ({"structured_outputs": {"choice": ["a"] * 1025}}, "at most 1024 strings, got 1025"),
    ({"structured_outputs": {"grammar": "start: start"}}, "cannot be used"),
    ({"structured_outputs": {"grammar": "no grammar"}}, "cannot be used"),
    ({"structured_outputs": {"grammar": 'start: "[" /((x{1000}){1000}){1000}/ "]"'}}, "at most 10000 characters"),
    ({"structured_outputs": {"grammar": 'start: "a" // it"s\n /(a {99}) {999}/ix'}}, "at most 10000 characters"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exclude each other"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "exclude each other"),
    ({"grammar": 'root ::= "a"', "regex": "a"}, "exclude each other"),
    ({"grammar": "no grammar"}, "cannot be used"),
    ({"response_format": {"type": "structural_tag"}}, "must have a format, or structures and triggers"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "format.type 'x' is not supported"),
    ({"structural_tag": {"type": "x"}}, "use response_format with type structural_tag"),
    ({"response_format": {"type": "regex"}}, "is empty"),
    ({"tfs_z": 0.5}, "tfs_z is not supported"),
    ({"top_a": 0.2}, "top_a is not supported"),
    ({"format": {"type": "object"}}, "use response_format"),
    ({"options": {"num_ctx": 5}}, "options is not supported"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words"),
    ({"response_format": {"type": "yaml"}}, "'yaml'"),
    ({"response_format": {"type": "json_schema"}}, "json_schema is required"),
    ({"response_format": {}}, "type"),
]


def test_structural_tags(live: LiveServer) -> None:
    """In both forms and both fields, on each route."""
    tag = {"begin": "<f=a>", "end": "</f>"}
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"type": "tag", "content": content, **tag}]}
    older = {"triggers": ["<f="], "structures": [{"schema": {"type": "integer"}, **tag}]}
    for wanted in ({"type": "structural_tag", "format": form}, {"type": "structural_tag"} | older):
        for ask in (chat, complete):
            for fields in ({"response_format": wanted}, {"structured_outputs": {"structural_tag": json.dumps(wanted)}}):
                assert ask(live, **fields).status == 200
    grammars = _grammars_sent(live)
    assert len(grammars) == 8
    assert len(set(grammars)) == 2  # in a chat, the model may reason first


@pytest.mark.parametrize(("fields", "says"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(live: LiveServer, fields: dict[str, Any], says: str) -> None:
    error = error_of(chat(live, **fields), 400)
    assert says in error["message"]
    assert error["param"].split(".")[0] in fields
    assert len(error["message"]) < 600
    assert _grammars_sent(live) == []


def test_text_format_of_responses(live: LiveServer) -> None:
    text_format = {"type": "json_schema", "name": "p", "schema": PERSON, "strict": True}
    answer = post(live, "/v1/responses", {"input": "Hello", "text": {"format": text_format}})
    assert answer.status == 200
    assert answer.json()["text"]["format"] == text_format
    assert "minimum" in _grammars_sent(live)[0]
    refused = post(live, "/v1/responses", {"input": "Hello", "text": {"format": {"type": "json_schema"}}})
    assert error_of(refused, 400)["param"] == "text.format.schema"


def test_the_frontend_itself_reads_no_grammar(live: LiveServer) -> None:
    assert chat(live, structured_outputs={"regex": "a+"}).status == 200
    assert children_named("penstock-grammar")
    code = "import sys, penstock.frontend.http.server; print('torch' in sys.modules, 'llguidance' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


# --- the reader alone -------------------------------------------------------------------------


@pytest.fixture
async def reader(checkpoint: Path) -> AsyncIterator[GrammarReader]:
    before = children_named("penstock-grammar")
    reader = GrammarReader(checkpoint)
    yield reader
    await reader.close()
    assert children_named("penstock-grammar") <= before


async def _failure(reading: Awaitable[object]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await reading
    return str(caught.value)


async def test_a_grammar_that_takes_too_long_is_given_up_and_its_process_is_gone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children_named("penstock-grammar")
    monkeypatch.setattr("penstock.frontend.text.child_pool._OWN_SHARE", 0.0)  # however busy the machine is
    monkeypatch.setattr("penstock.frontend.text.child_pool._PATIENCE", 1000)
    reader = GrammarReader(checkpoint, max_seconds=0.1)
    try:
        message = await _failure(reader.read(GrammarSource("json", SLOW, "response_format")))
        assert "takes longer than 0.1 seconds" in message
        assert len(children_named("penstock-grammar") - before) <= 1, "there is its successor at most"
        asked = reader._children.ask
        monkeypatch.setattr(reader._children, "ask", None)
        message = await _failure(reader.read(GrammarSource("json", SLOW, "another_field")))  # is not asked again
        assert "another_field cannot be used: parsing it takes longer than 0.1 seconds" in message
        monkeypatch.setattr(reader._children, "ask", asked)
        monkeypatch.setattr(reader, "_max_seconds", 60.0)
        assert (await reader.read(GrammarSource("regex", "a", "f"))).text  # in a new process
    finally:
        await reader.close()
    assert children_named("penstock-grammar") <= before


async def test_a_crash_is_not_blamed_on_a_request_that_can_be_read(reader: GrammarReader) -> None:
    before = children_named("penstock-grammar")
    await reader.read(GrammarSource("regex", "a", "f"))
    [pid] = children_named("penstock-grammar") - before
    reading = asyncio.create_task(reader.read(GrammarSource("regex", "b", "f")))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGSEGV)
    assert (await reading).text
    assert pid not in children_named("penstock-grammar")


async def test_a_process_that_died_while_idle_is_replaced(reader: GrammarReader) -> None:
    await reader.read(GrammarSource("regex", "a", "f"))
    [pid] = reader.process_ids
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.2)
    assert (await reader.read(GrammarSource("regex", "b", "f"))).text
    assert pid not in reader.process_ids


async def test_a_client_that_leaves_ends_the_reading(reader: GrammarReader) -> None:
    await reader.read(GrammarSource("regex", "a", "f"))
    [pid] = reader.process_ids
    reading = asyncio.create_task(reader.read(GrammarSource("json", SLOW, "f")))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert pid not in children_named("penstock-grammar")


async def test_what_is_read_is_remembered_within_bounds(reader: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GrammarSource("regex", "[a-z]+", "f")
    first = await reader.read(source)
    with monkeypatch.context() as patch:
        patch.setattr(reader._children, "ask", None)  # nobody can be asked
        assert await reader.read(source) == first
    assert "unclosed" in await _failure(reader.read(GrammarSource("regex", "(", "f")))
    for i in range(MAX_CACHED + 10):
        await reader.read(GrammarSource("regex", f"a{i}", "f"))
    assert len(reader._cache) == MAX_CACHED
    assert reader._cached_bytes == sum(len(key) + outcome.size for key, outcome in reader._cache.items())


async def test_too_many_at_once_are_told_to_wait(reader: GrammarReader) -> None:
    reads = [reader.read(GrammarSource("regex", f"b{i}", "f")) for i in range(MAX_QUEUED + 7)]  # two have a slot
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert sum(isinstance(outcome, Overloaded) for outcome in outcomes) == 5
    assert sum(isinstance(outcome, Grammar) for outcome in outcomes) == MAX_QUEUED + 2


async def test_identical_questions_at_once_are_one(reader: GrammarReader, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = []
    ask = reader._children.ask

    async def noted(question: list[Any], seconds: float, client: str) -> list[Any]:
        questions.append(question)
        return await ask(question, seconds, client)

    monkeypatch.setattr(reader._children, "ask", noted)
    source = GrammarSource("json", json.dumps(PERSON), "f")
    readings = [asyncio.create_task(reader.read(source, client)) for client in "abcdefgh"]
    await asyncio.sleep(0)
    readings[0].cancel()  # whoever asked first leaves: the others get their answer
    outcomes = await asyncio.gather(*readings, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert len(set(outcomes[1:])) == 1
    assert len(questions) == 1


async def test_new_schemas_do_not_wait_behind_a_client_with_slow_ones(checkpoint: Path) -> None:
    reader = GrammarReader(checkpoint)

    async def bomb(client: str) -> None:
        for i in range(1000):
            slow = f'start: %json {{"type": "integer", "multipleOf": {999_983 - 2 * i}}} | "{client}"'
            with suppress(InvalidRequest):
                await reader.read(GrammarSource("grammar", slow, "f"), client)

    try:
        for i in range(3):
            await reader.read(GrammarSource("regex", f"start{i}", "f"), "honest")
        bombs = [asyncio.create_task(bomb(client)) for client in "xxxxxxxxyyyyyyyy"]
        await asyncio.sleep(5)  # their accounts fill
        waits = []
        for i in range(5):
            began = time.monotonic()
            await reader.read(GrammarSource("json", json.dumps({"const": i}), "f"), "honest")
            waits.append(time.monotonic() - began)
        assert min(waits) < 8, waits
        assert max(waits) < 16, waits  # sixteen of two seconds each would be twice as much
    finally:
        for task in bombs:
            task.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)
        await reader.close()


async def test_a_model_without_a_usable_tokenizer(tmp_path: Path) -> None:
    reader = GrammarReader(tmp_path)
    assert "cannot be used with this model's tokenizer" in await _failure(reader.read(GrammarSource("regex", "a", "f")))


def test_the_process_has_bounds() -> None:
    code = (
        "from penstock.frontend.text.child_pool import limit_resources\n"
        "limit_resources()\n"
        "try:\n    bytearray(5 << 30)\nexcept MemoryError:\n    print('bounded')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "bounded"
