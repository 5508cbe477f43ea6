"""/health follows progress while there is work, /ready follows whether a request would be taken in."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import complete, error_of, get
from tests.frontend.live_server import LiveServer, live_server


@pytest.fixture
def impatient(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr("penstock.frontend.api.operations.STUCK_SECONDS", 2.0)
    with live_server(checkpoint, sockets) as live:
        yield live


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_work_there_need_be_no_progress(impatient: LiveServer) -> None:
    time.sleep(2.2)
    assert get(impatient, "/health").status == 200
    assert complete(impatient).status == 200
    assert get(impatient, "/health").status == 200


def test_steps_are_progress_and_silence_with_work_is_not(impatient: LiveServer) -> None:
    impatient.plays(lambda request, i: Script(hangs=True))
    waiting = threading.Thread(target=complete, args=(impatient,))
    waiting.start()
    for num_steps in range(1, 25):  # a long prefill: no token for more than two seconds, but steps
        told = impatient.scheduler.stats(num_steps=num_steps, num_running=1)
        impatient.do(lambda told=told: impatient.scheduler.tell(told))  # type: ignore[misc]
        time.sleep(0.1)
        assert get(impatient, "/health").status == 200
    wait_for(lambda: get(impatient, "/health").status == 503)
    assert "computed nothing" in error_of(get(impatient, "/health"), 503)["message"]
    impatient.do(lambda: impatient.scheduler.set_ready(False))
    wait_for(lambda: get(impatient, "/health").status == 200)  # the frontend waits for a worker, and is well
    impatient.close()
    waiting.join()


def test_a_silent_engine_is_missed_when_there_is_work(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, heartbeat_timeout=0.4) as live:
        assert complete(live).status == 200
        live.scheduler.is_silent = True
        wait_for(lambda: get(live, "/ready").status == 503)
        time.sleep(1.5)
        assert get(live, "/health").status == 200  # nobody has asked anything of it
        waiting = threading.Thread(target=complete, args=(live,))
        waiting.start()
        wait_for(lambda: get(live, "/health").status == 503)
        assert "silent" in error_of(get(live, "/health"), 503)["message"]
        live.scheduler.is_silent = False
        waiting.join()
        assert get(live, "/health").status == 200


def test_ready_means_that_the_queue_has_room(live: LiveServer) -> None:
    assert get(live, "/ready").status == 200
    full = live.scheduler.stats(num_waiting=1000, num_rows=8, num_running=8)
    live.do(lambda: live.scheduler.tell(full))
    live.wait_until(lambda: live.server.service.engine.stats == full)
    answer = get(live, "/ready")
    assert "queue is full" in error_of(answer, 503)["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert get(live, "/health").status == 200
    live.do(lambda: live.scheduler.tell(live.scheduler.stats()))
    wait_for(lambda: get(live, "/ready").status == 200)
