"""GET /metrics: what requests brought, and what the engine said last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.frontend.http_client import HELLO, chat, complete, get, post
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_disconnects import begin, leave

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_content(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:
        live.says("Water runs down", num_cached_tokens=1, delay=0.005)
        num_output = len(live.tokenizer.encode("Water runs down", add_special_tokens=False)) + 1
        num_prompt = post(live, "/tokenize", {"messages": HELLO}).json()["count"]
        chat(live, n=2)
        chat(live, stream=True)
        complete(live, max_tokens=1)
        complete(live, n=0)
        get(live, "/nowhere")
        stats = live.scheduler.stats(
            num_waiting=3,
            num_running=2,
            num_rows=2,
            num_pages=100,
            num_free_pages=60,
            num_cached_pages=30,
            num_used_pages=10,
        )
        live.do(lambda: live.scheduler.tell(stats))
        live.wait_until(lambda: live.server.service.engine.stats is not None)
        response = get(live, "/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        found = samples(response.text)

    def value(name: str, **labels: str) -> float:
        return found[f"penstock_{name}", tuple(sorted(labels.items()))]

    assert value("requests_total", endpoint="/v1/chat/completions", status="200") == 2
    assert value("requests_total", endpoint="/v1/completions", status="200") == 1
    assert value("requests_total", endpoint="/v1/completions", status="400") == 1
    assert value("requests_total", endpoint="unrouted", status="404") == 1
    assert value("request_success_total", finished_reason="stop") == 3
    assert value("request_success_total", finished_reason="length") == 1
    assert value("prompt_tokens_total") == 2 * num_prompt + 1
    assert value("generation_tokens_total") == 3 * num_output + 1
    assert value("prompt_tokens_cached_total") == 3
    assert value("time_to_first_token_seconds_count") == 3
    assert value("e2e_request_latency_seconds_count") == 3
    assert value("inter_token_latency_seconds_count") > 0
    assert value("inter_token_latency_seconds_sum") > 0.004
    assert value("request_generation_tokens_sum") == 3 * num_output + 1
    assert value("num_requests_waiting") == 3
    assert value("num_requests_running") == 2
    assert value("num_pages") == 100
    assert value("num_free_pages") == 60
    assert value("num_cached_pages") == 30
    assert value("num_used_pages") == 10
    assert value("kv_cache_usage_perc") == pytest.approx(0.1)
    assert value("engine_ready") == 1


def test_a_client_that_left_counts(live: LiveServer) -> None:
    live.gives([], hangs=True)
    before = samples(get(live, "/metrics").text)
    client = begin(live, "/v1/completions", {"prompt": "x"})
    live.wait_until(lambda: live.scheduler.num_running == 1)
    leave(client, rudely=False)
    live.wait_until(lambda: live.scheduler.num_running == 0)
    after = samples(get(live, "/metrics").text)
    for key in (
        ("penstock_requests_total", (("endpoint", "/v1/completions"), ("status", "499"))),
        ("penstock_request_success_total", (("finished_reason", "abort"),)),
    ):
        assert after[key] == before.get(key, 0) + 1


_WRITER = """
import sys
from penstock.frontend.metrics import Metrics
from penstock.frontend.replies import RequestRecord
metrics = Metrics(lambda: None)
record = RequestRecord("id", "/v1/completions", 0.0, status=200, num_prompt_tokens=int(sys.argv[1]))
record.finish_reasons.append("stop")
metrics.note(record, 1.0)
sys.stdout.buffer.write(metrics.exposition())
"""


def test_several_frontends_answer_as_one(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def run(num_prompt_tokens: int) -> Samples:
        command = [sys.executable, "-c", _WRITER, str(num_prompt_tokens)]
        return samples(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)

    assert run(5)["penstock_prompt_tokens_total", ()] == 5
    found = run(7)
    assert found["penstock_prompt_tokens_total", ()] == 12
    assert found["penstock_requests_total", (("endpoint", "/v1/completions"), ("status", "200"))] == 2
    assert found["penstock_e2e_request_latency_seconds_count", ()] == 2
