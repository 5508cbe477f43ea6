"""However a request ends, nothing of it stays in the frontend."""

import gc
import json
import socket
import tracemalloc

import psutil
import pytest

from penstock.frontend.api.body import decode
from penstock.frontend.engine.book import LiveRequest
from penstock.frontend.engine.generation import Generation, SequenceText
from penstock.frontend.exchange.replies import RequestRecord
from penstock.frontend.schema import COMPLETION
from tests.faults.soak import sized
from tests.frontend.http.test_disconnects import begin, leave
from tests.frontend.http_client import HELLO, chat, complete, post, raw_post
from tests.frontend.live_server import LiveServer

OF_A_REQUEST = (Generation, SequenceText, LiveRequest, RequestRecord)
NUM = 20


def num_survivors() -> int:
    return sum(type(thing) in OF_A_REQUEST for thing in gc.get_objects())


def num_survivors_after_collection() -> int:
    gc.collect()
    return num_survivors()


def end(live: LiveServer, how: str) -> None:
    """One request to its end."""
    match how:
        case "length":
            complete(live, max_tokens=4)
        case "stop":
            live.says("Water runs down.")
            chat(live, stop=["runs"], stream=True, n=2)
        case "refused":
            assert complete(live, temperature=-1).status == 400
        case "malformed":
            assert post(live, "/v1/completions", b"{").status == 400
        case "engine error":
            for error_code, code in (("ends_workers", "request_ends_workers"), ("invalid_logits", "invalid_logits")):
                live.gives([5], error="made up", error_code=error_code)
                answer = complete(live)
                assert answer.status == 500
                assert answer.headers["x-should-retry"] == "false"
                assert answer.json()["error"]["code"] == code
        case _:
            live.says("Water", hangs=True)
            before = len(live.scheduler.added)
            client = begin(live, "/v1/chat/completions", {"messages": HELLO, "stream": how == "reset"})
            live.wait_until(lambda: len(live.scheduler.added) > before)
            leave(client, rudely=how == "reset")
            live.wait_until(lambda: live.scheduler.num_running == 0)


@pytest.mark.parametrize("how", ["length", "stop", "refused", "malformed", "engine error", "left", "reset"])
def test_nothing_of_a_request_stays(live: LiveServer, how: str) -> None:
    before = num_survivors_after_collection()  # what other tests' servers left
    for _ in range(NUM):
        end(live, how)
    live.scheduler.received.clear()
    # Far fewer than there were: a loop's last turn may hold one.
    live.wait_until(lambda: num_survivors_after_collection() <= before + 4)


@pytest.mark.parametrize("how", ["refused", "malformed"])
def test_what_is_refused_is_gone_before_the_collector_comes(live: LiveServer, how: str) -> None:
    """A body of megabytes may be so few objects that the collector is in no hurry."""
    before = num_survivors_after_collection()
    gc.disable()
    try:
        for _ in range(NUM):
            end(live, how)
        live.wait_until(lambda: num_survivors() <= before + 4)
    finally:
        gc.enable()


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_body_does_not_stay_while_its_answer_is_made(live: LiveServer, stream: bool) -> None:
    live.says("Water", hangs=True)
    body = raw_post("/v1/completions", json.dumps({"prompt": "x", "stream": stream, "junk": "x" * 2_000_000}).encode())
    tracemalloc.start()
    try:
        clients = []
        for _ in range(3):
            clients.append(socket.create_connection(("127.0.0.1", live.port), timeout=60))
            clients[-1].sendall(body)
        live.wait_until(lambda: live.scheduler.num_running == 3)
        live.wait_until(lambda: tracemalloc.get_traced_memory()[0] < 2_000_000)
    finally:
        tracemalloc.stop()
        for client in clients:
            client.close()


def test_a_body_of_many_lists_is_read_without_the_collector() -> None:
    """It would look at all of them again and again, for seconds, and everybody's tokens would wait."""
    collections: list[str] = []
    body = b'{"prompt":[' + b",".join([b"[5]"] * 100_000) + b"]}"
    gc.callbacks.append(note := lambda phase, _: collections.append(phase))
    try:
        request = decode(COMPLETION, body)
        assert len(collections) <= 4  # once it is there, it may be looked at; "start" and "stop" of each time
    finally:
        gc.callbacks.remove(note)
    assert request.prompt is not None
    assert len(request.prompt) == 100_000
    assert gc.isenabled()


def test_long_integers_leave_nothing() -> None:
    """Each of them is longer than any number that a library keeps."""
    body = b'{"prompt":"x","max_tokens":' + b"9" * 100 + b"}"

    def read(times: int) -> int:
        for _ in range(times):
            assert decode(COMPLETION, body).max_tokens == 10**100 - 1
        return int(psutil.Process().memory_info().rss)

    before = read(20_000)
    assert read(sized(60_000, 1_000_000)) - before < 4 << 20
