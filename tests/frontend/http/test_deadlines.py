"""A request's time: 504 before the first byte, an error event after it, and the engine stops at once in both cases."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.frontend.http_client import complete, error_of, events, post
from tests.frontend.live_server import LiveServer, live_server


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "1e3", "soon", "", "0x10", "1,5", "9" * 10])
def test_a_bad_time_is_refused(live: LiveServer, given: str) -> None:
    error = error_of(post(live, "/v1/completions", {"prompt": "Hello"}, **{"x-request-timeout": given}), 400)
    assert error["param"] == "x-request-timeout"
    assert live.scheduler.added == []


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_byte_it_is_504(live: LiveServer, stream: bool) -> None:
    live.gives([], hangs=True)
    headers = {"x-request-timeout": "0.2"}
    error = error_of(post(live, "/v1/completions", {"prompt": "Hello", "n": 2, "stream": stream}, **headers), 504)
    assert error["code"] == "deadline_exceeded"
    assert "0.2 s" in error["message"]
    live.wait_until(lambda: live.scheduler.num_running == 0)


def test_after_it_it_is_an_error_event(live: LiveServer) -> None:
    live.gives(live.tokenizer.encode("The gate", add_special_tokens=False), hangs=True)
    response = post(live, "/v1/completions", {"prompt": "Hello", "stream": True}, **{"x-request-timeout": "0.5"})
    found = events(response)
    assert [event["choices"][0]["text"] for event in found[:-1]]
    assert found[-1]["error"]["code"] == "deadline_exceeded"
    live.wait_until(lambda: live.scheduler.num_running == 0)


def test_in_time_it_changes_nothing(live: LiveServer) -> None:
    headers = {"x-request-timeout": "9.5"}
    whole = post(live, "/v1/completions", {"prompt": "Hello", "temperature": 0}, **headers)
    assert whole.json()["choices"][0]["text"] == complete(live, temperature=0).json()["choices"][0]["text"]
    assert events(post(live, "/v1/completions", {"prompt": "Hello", "stream": True}, **headers))[-1] == "[DONE]"
    assert all(0 < request.seconds_left <= 9.5 for request in (live.scheduler.added[0], live.scheduler.added[-1]))
    assert live.scheduler.added[1].seconds_left == 0, "no limit"


def test_what_is_submitted_again_has_less_time_left(live: LiveServer) -> None:
    live.gives(live.tokenizer.encode("The gate", add_special_tokens=False), hangs=True)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(post, live, "/v1/completions", {"prompt": "Hello"}, **{"x-request-timeout": "4"})
        live.wait_until(lambda: live.scheduler.num_running == 1)
        time.sleep(0.2)
        live.do(live.scheduler.forget_peers)
        live.wait_until(lambda: len(live.scheduler.added) == 2)
        error_of(running.result(), 504)
    first, again = live.scheduler.added
    assert 0 < again.seconds_left <= first.seconds_left - 0.2


def test_the_server_bounds_everybodys_time(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, frontend={"max_request_timeout": 0.3}) as live:
        live.gives([], hangs=True)
        assert "0.3 s" in error_of(complete(live), 504)["message"]
        late = post(live, "/v1/completions", {"prompt": "Hello"}, **{"x-request-timeout": "100"})
        assert "0.3 s" in error_of(late, 504)["message"]


def test_waiting_for_an_engine_takes_time_too(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, is_ready=False) as live:
        late = post(live, "/v1/completions", {"prompt": "Hello"}, **{"x-request-timeout": "0.2"})
        assert error_of(late, 504)["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_in_the_queue_is_504(live: LiveServer, stream: bool) -> None:
    live.gives([], error="the request waited in the queue for more than 5 s", error_code="queue_timeout")
    error = error_of(complete(live, stream=stream), 504)
    assert error["code"] == "deadline_exceeded"
    assert "queue" in error["message"]
