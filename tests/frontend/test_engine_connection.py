"""The scheduler late, lost, restarted, refusing: requests wait, fail clearly, or go on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.ipc.messages import FrontendHello, Heartbeat
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import complete, error_of, events, get
from tests.frontend.live_server import live_server


def test_not_ready_then_ready(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.service.READY_WAIT_SECONDS", 0.2)
    with live_server(checkpoint, sockets, is_ready=False) as live:
        live.wait_until(lambda: len(live.scheduler.peers) == 1)
        assert get(live, "/health").status == 200
        assert error_of(get(live, "/ready"), 503)["code"] == "engine_not_ready"
        assert get(live, "/v1/models").json()["data"][0]["max_model_len"] is None
        response = complete(live)
        assert error_of(response, 503)["code"] == "engine_not_ready"
        assert response.headers["retry-after"] == "5"
        monkeypatch.setattr("penstock.frontend.service.READY_WAIT_SECONDS", 5.0)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(complete, live)
            time.sleep(0.1)
            live.do(lambda: live.scheduler.set_ready(True))
            assert waiting.result().status == 200
        assert get(live, "/ready").status == 200
        live.do(lambda: live.scheduler.set_ready(False))
        live.wait_until(lambda: live.server.service.engine.engine is None)
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
    """It does not know us: what was under way is lost, and said so; then all is well again."""
    with live_server(checkpoint, sockets) as live:
        live.gives([], hangs=True)
        with ThreadPoolExecutor(2) as threads:
            running = [threads.submit(complete, live, stream=stream) for stream in (False, True)]
            live.wait_until(lambda: live.scheduler.num_running == 2)
            live.do(live.scheduler.forget_peers)
            for future in running:
                assert error_of(future.result(), 503)["code"] == "engine_lost"
        live.wait_until(lambda: len(live.scheduler.peers) == 1)
        live.reset()
        assert complete(live).status == 200


def test_a_silent_scheduler(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.service.READY_WAIT_SECONDS", 0.1)
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
            live.wait_until(lambda: live.server.service.is_draining)
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
