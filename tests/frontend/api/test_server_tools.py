"""/tokenizer_info, /reset_prefix_cache, timings on request."""

from typing import Any

import pytest

from penstock.ipc.messages import ResetPrefixCache
from tests.frontend.checkpoint_folder import CHATML
from tests.frontend.http_client import chat, complete, error_of, events, get, post, send
from tests.frontend.live_server import LiveServer


def test_tokenizer_info(live: LiveServer) -> None:
    found = get(live, "/tokenizer_info").json()
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["eos_token"] == "<|im_end|>"
    assert found["chat_template"] == CHATML


def test_reset_prefix_cache(live: LiveServer) -> None:
    for response in (send(live, "POST", "/reset_prefix_cache"), post(live, "/reset_prefix_cache", {})):
        assert (response.status, response.json()) == (200, {"status": "ok"})
    assert error_of(get(live, "/reset_prefix_cache"), 405)["code"] == "method_not_allowed"
    live.wait_until(lambda: live.scheduler.received.count(ResetPrefixCache()) == 2)


def test_profiles_need_a_folder(live: LiveServer) -> None:
    for path in ("/start_profile", "/stop_profile"):
        assert "--profile FOLDER" in error_of(send(live, "POST", path), 400)["message"]
    for wrong in ("0", "1001", "-1", "x"):
        assert error_of(send(live, "POST", f"/start_profile?num_steps={wrong}"), 400)["param"] == "num_steps"


def test_reset_needs_an_engine(live: LiveServer) -> None:
    live.do(lambda: live.scheduler.set_ready(False))
    live.wait_until(lambda: live.server.service.engine.facts is None)
    try:
        assert error_of(send(live, "POST", "/reset_prefix_cache"), 503)["code"] == "engine_not_ready"
    finally:
        live.do(lambda: live.scheduler.set_ready(True))
        live.wait_until(lambda: live.server.service.engine.facts is not None)


def check(timings: dict[str, Any]) -> None:
    assert list(timings) == ["ttft_ms", "output_ms", "total_ms"]
    assert 5 < timings["ttft_ms"] < timings["total_ms"]
    assert 5 < timings["output_ms"] < timings["total_ms"]


@pytest.mark.parametrize("ask", [chat, complete])
def test_timings(live: LiveServer, ask: Any) -> None:
    live.says("Hello world", delay=0.02)
    check(ask(live, return_timings=True).json()["usage"]["timings"])
    assert "timings" not in ask(live).json()["usage"]
    found = events(ask(live, stream=True, stream_options={"include_usage": True}, return_timings=True))
    check(found[-2]["usage"]["timings"])
    assert error_of(ask(live, stream=True, return_timings=True), 400)["param"] == "return_timings"
