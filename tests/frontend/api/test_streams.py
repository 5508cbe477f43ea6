"""The course of a stream, byte for byte where it matters."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.frontend.api import service as service_module
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import HELLO, chat, complete, completion_text, error_of, events, raw_post
from tests.frontend.live_server import LiveServer


def test_order_of_a_chat_stream(live: LiveServer) -> None:
    live.says("Water runs", delay=0.01)
    response = chat(live, stream=True, stream_options={"include_usage": True})
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    found = events(response)
    fields = ["choices", "created", "id", "model", "object", "system_fingerprint", "usage"]
    assert [sorted(event) for event in found[:-1]] == [fields] * (len(found) - 1)
    role, *content, finish, usage, done = found
    assert role["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in content)
    assert finish["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"
    assert all(event["usage"] is None for event in found[:-2])
    assert all(event["object"] == "chat.completion.chunk" for event in found[:-1])


def test_usage_only_when_asked(live: LiveServer) -> None:
    found = events(chat(live, stream=True)) + events(complete(live, stream=True))
    assert not any("usage" in event for event in found if event != "[DONE]")
    found = events(complete(live, "Hello world", stream=True, stream_options={"include_usage": True}))
    assert found[-2]["usage"]["prompt_tokens"] == 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    live.says("Water runs down", delay=0.01)
    for stream in (
        chat(live, stream=True, stream_options=options),
        complete(live, stream=True, stream_options=options),
    ):
        counts = [event["usage"]["completion_tokens"] for event in events(stream)[:-1]]  # each event has it
        assert counts == sorted(counts)
        assert len(set(counts)) > 2
    alone = chat(live, stream=True, stream_options={"continuous_usage_stats": True})
    assert not any("usage" in event for event in events(alone)[:-1])


def test_token_by_token(live: LiveServer) -> None:
    """A token that arrives alone leaves alone; what has piled up leaves in one event."""
    ids = live.tokenizer.encode("Water runs down the pipe", add_special_tokens=False)
    live.gives(ids, delay=0.1)
    slow = events(complete(live, max_tokens=100, stream=True))
    assert len(slow) == len(ids) + 2
    live.gives(ids, per_step=100)
    assert len(events(complete(live, max_tokens=100, stream=True))) < len(ids)


def test_an_error_in_the_stream_has_no_done(live: LiveServer) -> None:
    live.says("Water runs", error="a device error", delay=0.02)
    response = complete(live, stream=True, max_tokens=100)
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert "[DONE]" not in response.text
    error = json.loads(blocks[-2].removeprefix("data: "))
    assert set(error) == {"error"}
    assert error["error"]["type"] == "server_error"
    assert error["error"]["code"] == "engine_error"
    assert "a device error" in error["error"]["message"]


def test_one_failing_sequence_ends_the_request_and_aborts_the_rest(live: LiveServer) -> None:
    water = live.tokenizer.encode("Water", add_special_tokens=False)
    live.plays(lambda request, i: Script(water, error="x", delay=0.02) if i == 1 else Script(water, hangs=True))
    assert error_of(chat(live, n=3), 500)["code"] == "engine_error"
    live.wait_until(lambda: live.scheduler.num_running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_are_status_codes(live: LiveServer, stream: bool) -> None:
    live.gives([], error="the limit is 10 sequences, 11 wait", error_code="queue_full")
    response = complete(live, stream=stream)
    error = error_of(response, 429)
    assert error["type"] == "rate_limit_error"
    assert "the limit is 10" in error["message"]
    assert int(response.headers["retry-after"]) >= 1
    live.gives([], error="needs 40 pages of 20", error_code="too_long")
    assert "40 pages" in error_of(complete(live, stream=stream), 400)["message"]
    live.gives([], finish="abort")
    assert error_of(complete(live, stream=stream), 500)["code"] == "engine_error"


def test_a_full_queue_is_refused_before_tokenizing(live: LiveServer) -> None:
    live.do(lambda: live.scheduler.tell(live.scheduler.stats(num_waiting=1000)))
    live.wait_until(lambda: live.server.service.engine.stats is not None)
    live.wait_until(lambda: live.server.service.engine.stats.num_waiting == 1000)  # type: ignore[union-attr]
    try:
        error = error_of(complete(live), 429)
        assert "1000" in error["message"]
        assert live.scheduler.added == []
    finally:
        live.do(lambda: live.scheduler.tell(live.scheduler.stats(num_waiting=0)))
        live.wait_until(lambda: live.server.service.engine.stats.num_waiting == 0)  # type: ignore[union-attr]


def test_silence_is_filled(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and a first sign come soon though the first token does not; then a comment now and then."""
    live.gives([], hangs=True)
    with socket.create_connection(("127.0.0.1", live.port)) as client:
        client.settimeout(60)
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        client.sendall(raw_post("/v1/chat/completions", body))
        received = b""
        while b'"role":"assistant"' not in received:
            received += client.recv(65536)
        for generation in live.do(lambda: list(live.server.service.generations)):
            live.do(generation.tick)
        while b": keep-alive\n\n" not in received:
            received += client.recv(65536)
    assert service_module.KEEP_ALIVE_SECONDS < 60


def test_many_streams_at_once_keep_their_texts(live: LiveServer) -> None:
    prompts = [live.tokenizer.decode(list(range(10 + i, 40 + i))) for i in range(40)]

    def run(prompt: str) -> str:
        return completion_text(events(complete(live, prompt, stream=True, max_tokens=200)))

    with ThreadPoolExecutor(20) as threads:
        solo = [run(prompt) for prompt in prompts[:3]]
        together = list(threads.map(run, prompts))
    assert together[:3] == solo
    assert together == prompts
