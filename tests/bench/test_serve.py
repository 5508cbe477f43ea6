"""`penstock bench serve` against a server whose delays are known."""

import asyncio
import json
import math
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.load.client import SSEReader
from penstock.bench.load.job import Outcome
from penstock.bench.load.report import percentile, summarize
from penstock.bench.load.serve import main
from penstock.bench.load.workload import draw
from penstock.config.argument_types import length_range
from tests.bench.fake_openai import Behaviour, fake_openai


async def bench(behaviour: Behaviour, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Run the command in a thread against the fake; its exit code and what it saved."""
    saved = tmp_path / "result.json"
    async with fake_openai(behaviour) as url:
        arguments = ["--base-url", url, "--quiet", "--save", str(saved), *flags]
        code = await asyncio.to_thread(main, arguments)
    return code, json.loads(saved.read_bytes()) if saved.exists() else {}


def on_any_machine(delay: float) -> object:
    """Equal to a time that has this delay in it: a busy machine adds to it, and takes nothing away."""
    return pytest.approx(delay * 2, abs=delay * 1.02)


async def test_latencies_are_those_of_the_server(tmp_path: Path) -> None:
    behaviour = Behaviour(first_after=0.1, gap=0.03)
    code, saved = await bench(behaviour, tmp_path, "--num-requests", "12", "--concurrency", "4", "--output-len", "6")
    assert code == 0
    summary = saved["summary"]
    assert summary["num_failed"] == 0
    for name, milliseconds in {"ttft_ms": 100, "itl_ms": 30, "tpot_ms": 30, "e2e_ms": 250}.items():
        assert summary[name]["p50"] == on_any_machine(milliseconds), name
    assert summary["num_output_tokens"] == 72
    assert summary["num_prompt_tokens"] == 12 * 11
    assert summary["num_cached_tokens"] == 12 * 4
    assert summary["duration_s"] == on_any_machine(3 * 0.25)
    assert behaviour.most_in_flight == 4
    assert len(saved["requests"]) == 12


@pytest.mark.parametrize(("has_usage", "flags"), [(True, []), (False, ["--return-token-ids"])])
async def test_coalesced_chunks_count_every_token(tmp_path: Path, has_usage: bool, flags: list[str]) -> None:
    behaviour = Behaviour(tokens_per_chunk=4, gap=0.04, has_usage=has_usage)
    code, saved = await bench(behaviour, tmp_path, "--num-requests", "2", "--output-len", "17", *flags)
    summary = saved["summary"]
    assert code == 0
    assert summary["num_output_tokens"] == 34
    assert summary["tokens_per_arrival"] == pytest.approx(17 / 5, abs=0.01)
    assert summary["itl_ms"]["p50"] == pytest.approx(40, abs=10)
    assert summary["tpot_ms"]["p50"] == pytest.approx(10, abs=3)  # four gaps of 40 ms for 16 tokens
    assert not summary["is_counted_by_chunks"]


async def test_a_server_without_usage_is_counted_by_chunks_and_says_so(tmp_path: Path) -> None:
    code, saved = await bench(
        Behaviour(has_usage=False, gap=0.01), tmp_path, "--num-requests", "1", "--output-len", "5"
    )
    assert code == 0
    assert saved["summary"]["num_output_tokens"] == 5
    assert saved["summary"]["is_counted_by_chunks"]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(fail_every=2), "HTTP 500"),
        (Behaviour(break_every=2), "ended early"),
        (Behaviour(error_event_every=2), "the engine died"),
    ],
)
async def test_failed_requests_are_counted_and_fail_the_run(tmp_path: Path, behaviour: Behaviour, message: str) -> None:
    behaviour.gap = 0.001
    code, saved = await bench(behaviour, tmp_path, "--num-requests", "6", "--concurrency", "1", "--output-len", "3")
    assert code == 1
    assert saved["summary"]["num_failed"] == 3
    assert saved["summary"]["num_output_tokens"] == 9
    assert message in next(iter(saved["summary"]["errors"]))


async def test_a_rate_gives_poisson_arrivals(tmp_path: Path) -> None:
    behaviour = Behaviour(first_after=0.0, gap=0.0)
    flags = ("--num-requests", "40", "--request-rate", "80", "--output-len", "1", "--seed", "3")
    code, saved = await bench(behaviour, tmp_path, *flags)
    assert code == 0
    starts = [request["start"] for request in saved["requests"]]
    planned = [r.arrival for r in draw(40, (128, 128), (1, 1), 80.0, [5, 6, 7, 8], 0, 3)]
    assert max(abs(start - arrival) for start, arrival in zip(starts, planned, strict=True)) < 0.1
    assert starts[-1] > 0.2


async def test_prompts_are_token_ids_of_the_range_and_words_where_ids_are_not_known(tmp_path: Path) -> None:
    behaviour = Behaviour(gap=0.0, first_after=0.0)
    flags = ["--num-requests", "8", "--input-len", "3:9", "--output-len", "1:4", "--shared-prefix-len", "2"]
    await bench(behaviour, tmp_path, *flags)
    prompts = [body["prompt"] for body in behaviour.bodies]
    assert all(3 <= len(prompt) <= 9 and set(prompt) <= {5, 6, 7, 8} for prompt in prompts)
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 1
    assert all(1 <= body["max_tokens"] <= 4 and body["ignore_eos"] and body["stream"] for body in behaviour.bodies)

    without = Behaviour(gap=0.0, first_after=0.0, has_tokenize=False)
    await bench(without, tmp_path, *flags)
    assert all(isinstance(body["prompt"], str) and len(body["prompt"].split()) >= 3 for body in without.bodies)

    chat = Behaviour(gap=0.0, first_after=0.0)
    code, saved = await bench(chat, tmp_path, "--endpoint", "chat", "--no-ignore-eos", *flags)
    assert code == 0
    assert saved["summary"]["num_output_tokens"] == sum(body["max_tokens"] for body in chat.bodies)
    assert all(body["messages"][0]["role"] == "user" and "ignore_eos" not in body for body in chat.bodies)


async def test_several_processes_share_the_load(tmp_path: Path) -> None:
    behaviour = Behaviour(first_after=0.05, gap=0.01)
    flags = ("--num-requests", "11", "--concurrency", "5", "--output-len", "4", "--processes", "2", "--warmup", "2")
    code, saved = await bench(behaviour, tmp_path, *flags)
    assert code == 0
    assert saved["summary"]["num_requests"] == 11
    assert saved["summary"]["num_output_tokens"] == 44
    assert len(behaviour.bodies) == 13  # two of them were the warm-up
    assert behaviour.most_in_flight <= 5


async def test_processes_without_a_request_in_flight_are_not_started(tmp_path: Path) -> None:
    behaviour = Behaviour(first_after=0.05, gap=0.01)
    flags = ("--num-requests", "8", "--concurrency", "2", "--output-len", "2", "--processes", "4")
    code, _ = await bench(behaviour, tmp_path, *flags)
    assert code == 0
    assert behaviour.most_in_flight <= 2


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_reasoning_is_part_of_an_answer(tmp_path: Path, field: str) -> None:
    flags = ("--endpoint", "chat", "--num-requests", "1", "--output-len", "3")
    code, saved = await bench(Behaviour(first_after=0.0, gap=0.0, field=field), tmp_path, *flags)
    assert code == 0
    assert saved["summary"]["num_output_tokens"] == 3


def test_a_failure_counts_in_the_duration() -> None:
    good = Outcome(start=0.0, ttft=0.5, e2e=1.0, num_output_tokens=10)
    summary = summarize([good, Outcome(start=1.0, e2e=4.0, error="HTTP 500")])
    assert (summary["duration_s"], summary["output_tokens_per_s"]) == (5.0, 2.0)
    assert summary["e2e_ms"]["max"] == 1000.0


async def test_an_error_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_openai(Behaviour(fail_every=1, failure="[red] is no [/INST]")) as url:
        assert await asyncio.to_thread(main, ["--base-url", url, "--num-requests", "1"]) == 1
    assert "[red] is no [/INST]" in capsys.readouterr().out


async def test_a_file_that_cannot_be_written_is_said_before_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour()
    async with fake_openai(behaviour) as url:
        flags = ["--base-url", url, "--num-requests", "1", "--save", str(tmp_path / "none" / "result.json")]
        assert await asyncio.to_thread(main, flags) == 2
    assert not behaviour.bodies
    assert "result.json" in capsys.readouterr().err


async def test_no_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["--base-url", "http://127.0.0.1:9", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock bench serve: http://127.0.0.1:9/v1/models")
    assert error.count("\n") == 1


async def test_the_table_shows_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_openai(Behaviour(gap=0.001, first_after=0.001)) as url:
        flags = ["--base-url", url, "--num-requests", "3", "--output-len", "2"]
        assert await asyncio.to_thread(main, flags) == 0
    shown = capsys.readouterr().out
    for word in ("TTFT", "ITL", "TPOT", "E2E", "p99", "output tokens/s"):
        assert word in shown


def test_events_are_found_whatever_the_packets() -> None:
    stream = b': hi\n\ndata: {"a":1}\r\n\r\nevent: x\ndata:{"b":2}\n\ndata: [DONE]\n\n'
    for size in (1, 2, 3, 7, len(stream)):
        reader = SSEReader()
        found = [data for i in range(0, len(stream), size) for data in reader.feed(stream[i : i + size])]
        assert found == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_percentiles_and_empty_runs() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 1.0) == 4.0
    assert math.isnan(percentile([], 0.5))
    assert summarize([])["num_requests"] == 0


def test_ranges_of_lengths() -> None:
    assert length_range("5") == (5, 5)
    assert length_range("5:9") == (5, 9)
    for wrong in ("0", "9:5", "x", "-1:3"):
        with pytest.raises(ArgumentTypeError, match=r"\d|x"):
            length_range(wrong)


def test_a_seed_fixes_the_workload() -> None:
    first = draw(20, (1, 50), (1, 50), 3.0, range(100), 0, 7)
    assert first == draw(20, (1, 50), (1, 50), 3.0, range(100), 0, 7)
    assert first != draw(20, (1, 50), (1, 50), 3.0, range(100), 0, 8)
