"""The scheduler late, lost, restarted, refusing: requests wait, fail clearly, or go on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.ipc.messages import FrontendHello, Heartbeat, SequenceDelta, TokenBatch
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import complete, error_of, events, get
from tests.frontend.live_server import live_server


def test_not_ready_then_ready(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.api.service.READY_WAIT_SECONDS", 0.2)
    with live_server(checkpoint, sockets, is_ready=False) as live:
        live.wait_until(lambda: len(live.scheduler.peers) == 1)
        assert get(live, "/health").status == 200
        assert error_of(get(live, "/ready"), 503)["code"] == "engine_not_ready"
        assert get(live, "/v1/models").json()["data"][0]["max_model_len"] is None
        response = complete(live)
        assert error_of(response, 503)["code"] == "engine_not_ready"
        assert response.headers["retry-after"] == "5"
        monkeypatch.setattr("penstock.frontend.api.service.READY_WAIT_SECONDS", 60.0)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(complete, live)
            time.sleep(0.1)
            live.do(lambda: live.scheduler.set_ready(True))
            assert waiting.result().status == 200
        assert get(live, "/ready").status == 200
        live.do(lambda: live.scheduler.set_ready(False))
        live.wait_until(lambda: live.server.service.engine.facts is None)
        assert error_of(get(live, "/ready"), 503)["code"] == "engine_not_ready"


def test_a_lost_worker_does_not_end_streams(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:
        live.says("Water runs", delay=0.05)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(complete, live, stream=True)
            live.wait_until(lambda: live.scheduler.num_running == 1)
            live.do(lambda: live.scheduler.set_ready(False))
            live.do(lambda: live.scheduler.set_ready(True))
            assert events(running.result())[-1] == "[DONE]"


def test_a_restarted_scheduler(checkpoint: Path, sockets: Path) -> None:
    """It does not know us: what was under way is submitted again, and nothing of it is lost or doubled."""
    text = "Water runs down the hill, and STOP here"
    with live_server(checkpoint, sockets) as live:
        live.says(text, delay=0.02, num_cached_tokens=3)
        fields = {"n": 2, "stop": ["STOP"], "logprobs": 1}
        expected = complete(live, **fields).json()
        assert expected["choices"][0]["text"] == "Water runs down the hill, and "
        live.reset()
        live.says(text, delay=0.2, num_cached_tokens=3)
        with ThreadPoolExecutor(2) as threads:
            whole = threads.submit(complete, live, **fields)
            stream = threads.submit(complete, live, stream=True, stream_options={"include_usage": True}, **fields)
            for num_restarts in (1, 2):
                live.wait_until(lambda: live.scheduler.num_running == 4)
                time.sleep(0.5)  # for some tokens of each
                assert live.do(lambda: live.scheduler.num_running) == 4
                live.do(live.scheduler.forget_peers)
                live.wait_until(lambda: len(live.scheduler.added) == 2 + 2 * num_restarts)  # noqa: B023
            answer, found = whole.result(), events(stream.result())
        assert [answer.json()[key] for key in ("choices", "usage")] == [expected[key] for key in ("choices", "usage")]
        assert found[-1] == "[DONE]"
        assert found[-2]["usage"] == expected["usage"]
        for choice in expected["choices"]:
            parts = [part for event in found[:-2] for part in event["choices"] if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
            assert tokens == choice["logprobs"]["tokens"]
        first, last = live.scheduler.added[0], live.scheduler.added[-1]
        assert not first.progress
        assert [resumed.sequence_idx for resumed in last.progress] == [0, 1]
        assert min(len(resumed.token_ids) for resumed in last.progress) > 0
        assert last.request_id not in (first.request_id, live.scheduler.added[1].request_id)
        live.wait_until(lambda: live.scheduler.num_running == 0)
        assert live.do(lambda: live.server.service.engine.num_live) == 0


def test_prompt_logprobs_survive_a_restart(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:
        fields = {"prompt_logprobs": 1, "max_tokens": 1}
        expected = complete(live, "Hello there", **fields).json()["choices"][0]
        live.reset()
        live.plays(lambda request, i: Script([5], delay=0.3))
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(complete, live, "Hello there", **fields)
            live.wait_until(lambda: live.scheduler.num_running == 1)
            time.sleep(0.1)
            live.do(live.scheduler.forget_peers)
            assert running.result().json()["choices"][0]["prompt_logprobs"] == expected["prompt_logprobs"]
        [resumed] = live.scheduler.added[-1].progress
        assert resumed.num_prompt_logprobs > 0


def test_what_comes_while_the_scheduler_is_away_waits(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:
        live.do(lambda: setattr(live.scheduler, "is_ready", False))
        live.do(live.scheduler.forget_peers)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(complete, live)  # nobody knows yet that the scheduler is another one
            live.wait_until(lambda: live.server.service.engine.facts is None)
            live.do(lambda: live.scheduler.set_ready(True))
            assert running.result().status == 200


def test_a_scheduler_that_does_not_come_back(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.engine.book.RESUME_WAIT_SECONDS", 0.3)
    with live_server(checkpoint, sockets) as live:
        live.gives([5, 6], hangs=True)
        with ThreadPoolExecutor(2) as threads:
            whole, stream = [threads.submit(complete, live, stream=stream) for stream in (False, True)]
            live.wait_until(lambda: live.scheduler.num_running == 2)
            time.sleep(0.1)
            live.do(lambda: setattr(live.scheduler, "is_ready", False))
            live.do(live.scheduler.forget_peers)
            assert error_of(whole.result(), 503)["code"] == "engine_lost"
            assert "engine_lost" in stream.result().text
            assert "[DONE]" not in stream.result().text
        live.wait_until(lambda: len(live.scheduler.peers) == 1)
        live.reset()
        live.do(lambda: live.scheduler.set_ready(True))
        assert complete(live).status == 200
        assert len(live.scheduler.added) == 1


def test_a_request_that_is_lost_again_and_again(checkpoint: Path, sockets: Path) -> None:
    """Perhaps it is what ends the scheduler: it is not submitted for ever."""
    with live_server(checkpoint, sockets) as live:
        live.gives([], hangs=True)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(complete, live)
            for num_submissions in range(1, 5):
                live.wait_until(lambda: len(live.scheduler.added) == num_submissions)  # noqa: B023
                live.do(live.scheduler.forget_peers)
            assert error_of(running.result(), 503)["code"] == "engine_lost"
        live.wait_until(lambda: len(live.scheduler.peers) == 1)
        assert len(live.scheduler.added) == 4


def test_a_silent_scheduler(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is a loss; a scheduler that answers nothing but hellos is not waited for without end."""
    monkeypatch.setattr("penstock.frontend.api.service.READY_WAIT_SECONDS", 0.1)
    with live_server(checkpoint, sockets, heartbeat_timeout=0.6) as live:
        live.gives([], hangs=True)
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(complete, live)
            live.wait_until(lambda: live.scheduler.num_running == 1)
            live.do(live.scheduler._beat.cancel)
            assert error_of(running.result(), 503)["code"] == "engine_lost"
        assert error_of(complete(live), 503)["code"] in ("engine_not_ready", "engine_lost")


def test_hello_and_heartbeats(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:
        live.wait_until(lambda: any(isinstance(message, Heartbeat) for message in live.scheduler.received))
        hellos = [message for message in live.scheduler.received if isinstance(message, FrontendHello)]
        [hello] = hellos
        assert hello.name == "penstock-frontend-0"
        assert len(hello.model_fingerprint) == 16


def test_refused_by_the_scheduler(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:
        live.do(lambda: setattr(live.scheduler, "refusal", "another model"))
        live.do(live.scheduler.forget_peers)
        live.wait_until(live.server.stopped.is_set)
        assert live.server.exit_code == 2


def test_drain(checkpoint: Path, sockets: Path) -> None:
    """New work is refused; what runs may finish; what does not finish in time ends with an error event."""
    with live_server(checkpoint, sockets, frontend={"shutdown_timeout": 0.8}) as live:
        live.plays(lambda request, i: _slow(request.priority))
        with ThreadPoolExecutor(3) as threads:
            quick = threads.submit(complete, live, stream=True, priority=0)
            whole = threads.submit(complete, live, priority=0)
            endless = threads.submit(complete, live, stream=True, priority=1)
            live.wait_until(lambda: live.scheduler.num_running == 3)
            closing = threading.Thread(target=live.close)
            closing.start()
            live.wait_until(lambda: live.server.service.generations.is_draining)
            assert error_of(complete(live), 503)["code"] == "shutting_down"
            assert error_of(get(live, "/ready"), 503)["code"] == "shutting_down"
            assert get(live, "/health").status == 200
            assert events(quick.result())[-1] == "[DONE]"
            assert whole.result().status == 200
            assert "shutting_down" in endless.result().text
            assert "[DONE]" not in endless.result().text
            closing.join()


def _slow(priority: int) -> Script:
    return Script([5, 6, 7], delay=0.1, hangs=priority == 1)


def test_garbage_from_the_scheduler_s_side_changes_nothing_and_is_counted(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:
        live.says("Water runs down the hill", delay=0.02)
        expected = complete(live).json()["choices"][0]["text"]
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(complete, live)
            live.wait_until(lambda: live.scheduler.num_running == 1)
            live.do(
                lambda: live.scheduler.throw([b"", b"\xc1", b"\x91" * 100_000, b'{"a":1}', b"\xdd\xff\xff\xff\xff"])
            )
            live.do(lambda: live.scheduler.tell(TokenBatch(1 << 60, (SequenceDelta("nobody", 1 << 60, (1 << 40,)),))))
            assert running.result().json()["choices"][0]["text"] == expected
        assert "penstock_dropped_messages_total 5.0" in get(live, "/metrics").text
