"""The events of streams: golden sequences, and that they say what the whole message says."""

import json
from typing import Any

import pytest

from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import post
from tests.frontend.live_server import LiveServer
from tests.frontend.messages.conftest import body
from tests.frontend.parsing.test_tools import CALL, THOUGHT

TEXT = "Water runs."
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
THINKING = {"type": "enabled", "budget_tokens": 1024}
SIGNATURE = "Hln5aOTPkhGBvhBDSDAzV9s2N/LBqAz2sbxuhLuViUE="


def events(content: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Every event with its name; nothing else is in the stream."""
    found = []
    assert content.endswith(b"\n\n")
    for block in content.decode().removesuffix("\n\n").split("\n\n"):
        head, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert head == f"event: {event['type']}"
        found.append((event["type"], event))
    return found


def joined(stream: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The events without what differs between requests, deltas of a kind together: they come in any pieces."""
    told: list[Any] = []
    for kind, event in stream:
        event = {key: value for key, value in event.items() if key != "type"}
        if kind == "message_start":
            assert event["message"].pop("id").startswith("msg_")
        if kind != "content_block_delta":
            told.append((kind, event))
            continue
        delta = event["delta"].pop("type")
        [text] = event["delta"].values()
        name = f"{event['index']} {delta}"
        if told and told[-1][0] == name:
            told[-1] = (name, told[-1][1] + text)
        else:
            told.append((name, text))
    return told


def start(num_input: int, num_cached: int = 0) -> tuple[str, Any]:
    usage = {
        "input_tokens": num_input,
        "output_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
        "service_tier": "standard",
    }
    message: dict[str, Any] = {
        "type": "message",
        "model": "test/model",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
        "role": "assistant",
        "stop_details": None,
    }
    return "message_start", {"message": message}


def end(stop_reason: str, num_input: int, num_output: int, stop_sequence: str | None = None, **usage: Any) -> Any:
    told = {
        "input_tokens": num_input,
        "output_tokens": num_output,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "service_tier": "standard",
        **usage,
    }
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    return [("message_delta", {"delta": delta, "usage": told}), ("message_stop", {})]


def text_block(index: int, text: str, *, pings: bool = False) -> list[tuple[str, Any]]:
    return [
        ("content_block_start", {"index": index, "content_block": {"type": "text", "text": ""}}),
        *([("ping", {})] if pings else []),
        (f"{index} text_delta", text),
        ("content_block_stop", {"index": index}),
    ]


def tool_block(index: int, call_id: str, *, pings: bool = False) -> list[tuple[str, Any]]:
    block = {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {}}
    return [
        ("content_block_start", {"index": index, "content_block": block}),
        *([("ping", {})] if pings else []),
        (f"{index} input_json_delta", '{"city": "Tromsø"}'),
        ("content_block_stop", {"index": index}),
    ]


def stream(live: LiveServer, **fields: Any) -> list[Any]:
    answer = post(live, "/v1/messages", body(stream=True, **fields))
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return joined(events(answer.content))


def num_tokens(live: LiveServer, text: str) -> int:
    """Those that the script gives, and the one that stops."""
    return len(live.tokenizer.encode(text, add_special_tokens=False)) + 1


def num_prompt(live: LiveServer) -> int:
    return len(live.scheduler.added[-1].prompt_token_ids) // 4


@pytest.mark.parametrize("per_step", [1, 7, 1000])
def test_a_text(live: LiveServer, per_step: int) -> None:
    live.says(TEXT, per_step=per_step)
    told = stream(live)
    num = num_prompt(live)
    assert told == [start(num), *text_block(0, TEXT, pings=True), *end("end_turn", num, num_tokens(live, TEXT))]


@pytest.mark.parametrize("per_step", [1, 7, 1000])
def test_thinking_text_and_two_calls(live: LiveServer, per_step: int) -> None:
    output = f"{THOUGHT}I look.\n{CALL}\n{CALL}"
    live.says(output, per_step=per_step)
    told = stream(live, tools=TOOLS, thinking=THINKING)
    num = num_prompt(live)
    [first, second] = [
        e["content_block"]["id"] for k, e in told if k == "content_block_start" and "id" in e["content_block"]
    ]
    assert first != second
    assert first.startswith("toolu_")
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    details = {"thinking_tokens": num_tokens(live, THOUGHT.rstrip()) - 1}
    assert told == [
        start(num),
        ("content_block_start", {"index": 0, "content_block": thinking}),
        ("ping", {}),
        ("0 thinking_delta", "Let me see."),
        ("0 signature_delta", SIGNATURE),
        ("content_block_stop", {"index": 0}),
        *text_block(1, "I look."),
        *tool_block(2, first),
        *tool_block(3, second),
        *end("tool_use", num, num_tokens(live, output), output_tokens_details=details),
    ]


def test_hidden_thinking_has_no_deltas(live: LiveServer) -> None:
    live.says(THOUGHT + TEXT)
    told = stream(live, thinking=THINKING | {"display": "omitted"})
    kinds = [kind for kind, _ in told]
    assert kinds[:5] == [
        "message_start", "content_block_start", "ping", "0 signature_delta", "content_block_stop",
    ]  # fmt: skip
    assert kinds[5:] == ["content_block_start", "1 text_delta", "content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence(live: LiveServer) -> None:
    live.says("Water runs. STOP here")
    told = stream(live, stop_sequences=["STOP"])
    [(_, last), _] = told[-2:]
    assert told[1:5] == text_block(0, "Water runs. ", pings=True)
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


def test_the_length_limits(live: LiveServer) -> None:
    live.says(TEXT * 9)
    assert stream(live, max_tokens=2)[-2][1]["delta"]["stop_reason"] == "max_tokens"
    live.says("a" * 4096)
    for max_tokens in (100_000, 2**31 - 1):
        last = stream(live, max_tokens=max_tokens)[-2][1]
        assert last["delta"]["stop_reason"] == "model_context_window_exceeded"


def test_nothing_is_said(live: LiveServer) -> None:
    live.says("")
    told = stream(live)
    num = num_prompt(live)
    assert told == [start(num), *end("end_turn", num, 1)]


def test_what_was_cached(live: LiveServer) -> None:
    live.says(TEXT, num_cached_tokens=16)
    told = stream(live)
    assert told[0] == start(num_prompt(live) - 16, 16)
    assert told[-2][1]["usage"]["cache_read_input_tokens"] == 16


def test_a_failure_after_the_first_byte(live: LiveServer) -> None:
    ids = live.tokenizer.encode(TEXT, add_special_tokens=False)
    live.plays(lambda request, index: Script(ids, error="no more", delay=0.01))
    answer = post(live, "/v1/messages", body(stream=True))
    found = events(answer.content)
    assert found[0][0] == "message_start"
    kind, error = found[-1]
    assert kind == "error"
    assert error == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine failed on this request: no more"},
        "request_id": answer.headers["request-id"],
    }


def test_silence_is_filled_with_pings(live: LiveServer) -> None:
    """The head and a first event come long before the first token; what was cached is told at the end."""
    live.says(TEXT, delay=1.2, per_step=1000, num_cached_tokens=16)
    told = stream(live)
    num = num_prompt(live)
    assert told[:2] == [start(num), ("ping", {})]
    assert told[2:5] == text_block(0, TEXT)
    assert told[-2][1]["usage"]["input_tokens"] == num - 16
