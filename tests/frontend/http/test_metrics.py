"""GET /metrics: what requests brought, and what the engine said last."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.metrics_board import _HEADER, _SLOT_BYTES, MetricsBoard, Sample
from penstock.frontend.exchange.replies import RequestRecord
from penstock.ipc.messages import DraftStats
from tests.frontend.http.test_disconnects import begin, leave
from tests.frontend.http_client import HELLO, chat, complete, get, post
from tests.frontend.live_server import LiveServer, live_server

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


def test_what_a_drafter_has_guessed(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets) as live:

        def told(drafts: DraftStats | None, steps: int) -> Samples:
            stats = replace(live.scheduler.stats(num_steps=steps), drafts=drafts)
            live.do(lambda: live.scheduler.tell(stats))
            live.wait_until(lambda: (last := live.server.service.engine.stats) is not None and last.num_steps == steps)
            return samples(get(live, "/metrics").text)

        assert not any(name.startswith("penstock_draft") for name, _ in told(None, 7))
        stats = DraftStats(
            "eagle", is_on=True, num_steps=9, num_guessed=12, num_accepted=5, guessed_at=(8, 4), accepted_at=(4, 1),
            acceptance=0.4, draft_us=1_500_000, saved_us=-250_000,
        )  # fmt: skip
        found = told(stats, 8)
        by_drafter = {name: value for (name, labels), value in found.items() if labels == (("drafter", "eagle"),)}
        assert by_drafter == {
            "penstock_draft_steps_total": 9,
            "penstock_draft_guessed_tokens_total": 12,
            "penstock_draft_accepted_tokens_total": 5,
            "penstock_draft_acceptance": 0.4,
            "penstock_draft_seconds_total": 1.5,
            "penstock_draft_saved_seconds": -0.25,
            "penstock_drafter_failed": 0,
        }
        for what, counts in (("guessed", (8, 4)), ("accepted", (4, 1))):
            name = f"penstock_draft_{what}_tokens_by_position_total"
            assert [found[name, (("position", str(i)),)] for i in (1, 2)] == list(counts)
        failed = told(replace(stats, is_on=False), 10)
        assert failed["penstock_drafter_failed", (("drafter", "eagle"),)] == 1


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


def note_request(metrics: Metrics, num_prompt_tokens: int, endpoint: str = "/v1/completions") -> None:
    record = RequestRecord("id", endpoint, 0.0, status=200, num_prompt_tokens=num_prompt_tokens)
    record.finish_reasons.append("stop")
    metrics.note(record, 1.0)


def told(metrics: Metrics) -> Samples:
    return samples(metrics.exposition().decode())


@pytest.fixture
def shared_memory() -> Iterator[int]:
    descriptor = os.memfd_create("metrics")
    yield descriptor
    os.close(descriptor)


def test_several_frontends_answer_as_one(shared_memory: int) -> None:
    first, second = (Metrics(dict, MetricsBoard(shared_memory, i, 2)) for i in range(2))
    note_request(first, 5)
    note_request(second, 7)
    note_request(second, 1, endpoint="/v1/chat/completions")
    first.live_requests.inc()
    first.share()
    found = told(second)
    assert found["penstock_prompt_tokens_total", ()] == 13
    assert found["penstock_requests_total", (("endpoint", "/v1/completions"), ("status", "200"))] == 2
    assert found["penstock_requests_total", (("endpoint", "/v1/chat/completions"), ("status", "200"))] == 1
    assert found["penstock_e2e_request_latency_seconds_count", ()] == 3
    assert found["penstock_num_requests_in_frontend", ()] == 1
    assert told(first) == found


def test_what_one_told_the_other_does_not_take_back(shared_memory: int) -> None:
    """A counter that falls would count as a restart, and all of it once more."""
    frontends = [Metrics(dict, MetricsBoard(shared_memory, i, 2)) for i in range(2)]
    draw, last = random.Random(0), 0.0
    for i in range(200):
        note_request(draw.choice(frontends), 1)
        if i % 7 == 0:
            draw.choice(frontends).share()
        found = told(draw.choice(frontends))["penstock_prompt_tokens_total", ()]
        assert found >= last
        last = found
    for metrics in frontends:
        metrics.share()
    assert told(frontends[0])["penstock_prompt_tokens_total", ()] == 200


def test_a_frontend_goes_on_counting_where_its_predecessor_died(shared_memory: int) -> None:
    first, second = (Metrics(dict, MetricsBoard(shared_memory, i, 2)) for i in range(2))
    note_request(first, 5)
    first.live_requests.inc()
    first.share()
    note_request(second, 7)
    successor = Metrics(dict, MetricsBoard(shared_memory, 0, 2))
    note_request(successor, 1)
    successor.share()
    found = told(second)
    assert found["penstock_prompt_tokens_total", ()] == 13
    assert found["penstock_num_requests_in_frontend", ()] == 0


def test_a_torn_snapshot_is_not_read(shared_memory: int) -> None:
    board = MetricsBoard(shared_memory, 0, 2)
    for value in (1.0, 2.0):
        board.publish({"a": [Sample("a_total", {}, value)]})
    latest = 2 * 0 * _SLOT_BYTES  # the second snapshot's place
    os.pwrite(shared_memory, b"\xff", latest + _HEADER.size + 3)  # as if its writer had died within
    assert MetricsBoard(shared_memory, 1, 2).others() == [{"a": [Sample("a_total", {}, 1.0)]}]


def test_no_memory_to_share_in_is_survived() -> None:
    full = os.open("/dev/full", os.O_RDWR)  # reads zeros, takes nothing
    try:
        first, second = (Metrics(dict, MetricsBoard(full, i, 2)) for i in range(2))
        note_request(first, 5)
        note_request(second, 7)
        assert told(first)["penstock_prompt_tokens_total", ()] == 5
        assert told(second)["penstock_prompt_tokens_total", ()] == 7
    finally:
        os.close(full)


def test_vllm_names(checkpoint: Path, sockets: Path) -> None:
    """What vLLM's dashboards and the endpoint pickers read, with the labels that they ask for."""
    with live_server(checkpoint, sockets, frontend={"metrics_names": "both"}) as live:
        live.says("Water runs down", num_cached_tokens=1, delay=0.005)
        chat(live)
        chat(live, stream=True)
        complete(live, max_tokens=1)
        drafts = DraftStats("ngram", True, num_steps=2, num_guessed=9, num_accepted=5, accepted_at=(4, 1))
        stats = live.scheduler.stats(
            num_waiting=3, num_running=2, num_pages=100, num_used_pages=10, page_size=16, num_prompt_tokens=50,
            num_cached_tokens=20,
        )  # fmt: skip
        live.do(lambda: live.scheduler.tell(replace(stats, drafts=drafts)))
        live.wait_until(lambda: live.server.service.engine.stats is not None)
        found = samples(get(live, "/metrics").text)

    def value(name: str, **labels: str) -> float:
        return found[f"vllm:{name}", tuple(sorted({"model_name": "test/model", "engine": "0", **labels}.items()))]

    assert (value("num_requests_waiting"), value("num_requests_running")) == (3, 2)
    assert value("kv_cache_usage_perc") == pytest.approx(0.1)
    assert value("cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (50, 20)
    assert value("spec_decode_num_draft_tokens_total") == 9
    assert value("spec_decode_num_accepted_tokens_total") == 5
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="0") == 4
    assert value("request_success_total", finished_reason="stop") == 2
    assert value("request_success_total", finished_reason="length") == 1
    for name in ("prompt_tokens_total", "generation_tokens_total", "prompt_tokens_cached_total"):
        assert value(name) == found[f"penstock_{name}", ()] > 0
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_time_per_output_token_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_inference_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert value(f"{name}_bucket", le="+Inf") == value(f"{name}_count") > 0
        assert value(f"{name}_sum") >= 0
    [adapters] = [labels for name, labels in found if name == "vllm:lora_requests_info"]
    assert dict(adapters) == {"max_lora": "32", "running_lora_adapters": "", "waiting_lora_adapters": ""}


def test_tool_calls_are_stops_under_vllm_names() -> None:
    metrics = Metrics(dict, vllm_model="m")
    for reasons in (["stop"], ["tool_calls", "stop"], ["length"]):
        metrics.note(RequestRecord("id", "/", 0.0, finish_reasons=reasons), 1.0)
    found = samples(metrics.exposition().decode())
    name = "vllm:request_success_total"
    ended = {dict(labels)["finished_reason"]: count for (each, labels), count in found.items() if each == name}
    assert ended == {"stop": 3, "length": 1}
    assert not [name for name, _ in samples(Metrics(dict).exposition().decode()) if name.startswith("vllm:")]
