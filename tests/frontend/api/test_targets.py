"""Targets for the first token and those after it: by field and by header, to the scheduler and back to the client."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.frontend.http_client import complete, error_of, events, post
from tests.frontend.live_server import LiveServer

TTFT, TPOT = "x-slo-ttft-ms", "x-slo-tpot-ms"


@pytest.mark.parametrize("name", [TTFT, TPOT])
@pytest.mark.parametrize("given", ["-1", "nan", "inf", "1e3", "soon", "", "0x10", "1,5", "9" * 10])
def test_a_bad_header_is_refused(live: LiveServer, name: str, given: str) -> None:
    error = error_of(post(live, "/v1/completions", {"prompt": "Hello"}, **{name: given}), 400)
    assert error["param"] == name
    assert "milliseconds" in error["message"]
    assert live.scheduler.added == []


@pytest.mark.parametrize("field", ["slo_ttft_ms", "slo_tpot_ms"])
@pytest.mark.parametrize("given", [-1, 1e10, "soon", [1], True])
def test_a_bad_field_is_refused(live: LiveServer, field: str, given: object) -> None:
    assert error_of(complete(live, **{field: given}), 400)["param"] == field
    assert error_of(complete(live, slo_tpot_ms=0), 400)["param"] == "slo_tpot_ms"
    assert live.scheduler.added == []


def test_the_scheduler_hears_what_is_left_of_them(live: LiveServer) -> None:
    complete(live, slo_ttft_ms=800, slo_tpot_ms=50)
    post(
        live, "/v1/completions", {"prompt": "Hello", "slo_ttft_ms": 900, "slo_tpot_ms": 20}, **{TTFT: "700", TPOT: "30"}
    )
    post(live, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, **{TTFT: "0"})
    post(live, "/v1/responses", {"input": "Hi", "slo_tpot_ms": 40})
    complete(live)
    by_body, by_both, due_now, of_responses, none = live.scheduler.added
    assert 0.5 < by_body.ttft_left < 0.8
    assert by_body.tpot == 0.05
    assert 0.4 < by_both.ttft_left < 0.7, "the stricter one counts"
    assert by_both.tpot == 0.02
    assert (due_now.ttft_left, due_now.tpot) == (0.001, 0.0)
    assert (of_responses.ttft_left, of_responses.tpot) == (0.0, 0.04)
    assert (none.ttft_left, none.tpot) == (0.0, 0.0)


def test_usage_tells_whether_they_were_met(live: LiveServer) -> None:
    met = complete(live, slo_ttft_ms=5000, slo_tpot_ms=1000).json()["usage"]["slo"]
    assert met == {"ttft_ms": 5000, "tpot_ms": 1000, "met": True}
    missed = post(live, "/v1/completions", {"prompt": "Hello"}, **{TTFT: "0"}).json()["usage"]["slo"]
    assert missed == {"ttft_ms": 0, "tpot_ms": None, "met": False}
    assert "slo" not in complete(live).json()["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    [usage] = [event["usage"] for event in events(complete(live, slo_ttft_ms=5000, **options))[:-1] if event["usage"]]
    assert usage["slo"]["met"]


@pytest.mark.parametrize("stream", [False, True])
def test_who_was_demoted_is_told_why(live: LiveServer, stream: bool) -> None:
    reason = "the first token is due in 40 ms and takes about 450 ms from now"
    live.gives(live.tokenizer.encode("The gate", add_special_tokens=False), late=reason)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = complete(live, slo_ttft_ms=500, **options)
    assert reason in response.headers["x-penstock-warning"]
    usage = events(response)[-2]["usage"] if stream else response.json()["usage"]
    assert usage["slo"]["demoted"] == reason


@pytest.mark.parametrize("stream", [False, True])
def test_who_is_refused_is_told_why_and_when_to_come_again(live: LiveServer, stream: bool) -> None:
    live.gives([], error="the first token was due 3 ms ago", error_code="late")
    response = complete(live, slo_ttft_ms=500, stream=stream)
    error = error_of(response, 429)
    assert (error["code"], error["type"]) == ("slo_missed", "rate_limit_error")
    assert "due 3 ms ago" in error["message"]
    assert int(response.headers["retry-after"]) >= 1


def test_what_can_never_be_met_is_the_clients_mistake(live: LiveServer) -> None:
    live.gives([], error="a token for each 5 ms was asked for, and one takes 10 ms here", error_code="unattainable")
    response = complete(live, slo_tpot_ms=5)
    error = error_of(response, 400)
    assert (error["code"], error["type"]) == ("slo_unattainable", "invalid_request_error")
    assert "retry-after" not in response.headers


def test_what_is_submitted_again_has_less_time_left(live: LiveServer) -> None:
    live.gives([], hangs=True)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(
            post, live, "/v1/completions", {"prompt": "Hello", "slo_ttft_ms": 3000}, **{"x-request-timeout": "4"}
        )
        live.wait_until(lambda: live.scheduler.num_running == 1)
        time.sleep(0.2)
        live.do(live.scheduler.forget_peers)
        live.wait_until(lambda: len(live.scheduler.added) == 2)
        first, again = live.scheduler.added
    assert 0 < again.ttft_left <= first.ttft_left - 0.2
