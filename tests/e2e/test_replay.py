"""What a real server answers is the same whatever else runs, and its recording gives it again, in any batch."""

import asyncio
import json
import signal
import stat
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from penstock.parts.recording.reader import Recording
from penstock.replay.__main__ import main
from tests.core.driver import make_request
from tests.e2e.servers import Server, serving, stream
from tests.parts.recording.test_recorder import RecordedDriver

FLAGS = ("--dtype", "float32", "--cpu-kernels", "native", "--max-num-seqs", "12", "--num-pages", "64")
WANTED: dict[str, Any] = {"prompt": "How does a scheduler", "max_tokens": 160, "ignore_eos": True}
SEEDED, GREEDY = WANTED | {"seed": 7, "temperature": 0.9}, WANTED | {"temperature": 0}
NO_VECTORS = "it asked for an embedding, and vectors are not recorded"
CHAT = {"messages": [{"role": "user", "content": "What is a page?"}], "seed": 3, "max_tokens": 30}


async def answer(http: aiohttp.ClientSession, server: Server, body: dict[str, Any], name: str = "") -> tuple[Any, str]:
    """Everything in an answer's choices, and its fingerprint."""
    route = "chat/completions" if "messages" in body else "completions"
    headers = {"x-request-id": name} if name else {}
    async with server_post(http, server, route, body, headers) as response:
        assert response.status == 200, await response.text()
        told = await response.json()
        return told["choices"], told["system_fingerprint"]


def server_post(
    http: aiohttp.ClientSession, server: Server, route: str, body: dict[str, Any], headers: dict[str, str]
) -> Any:
    return http.post(f"{server.url}/v1/{route}", json=body | {"return_token_ids": True}, headers=headers)


def others(count: int) -> list[dict[str, Any]]:
    """Requests of all kinds, without a seed, which have nothing to do with those that are looked at."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "n": 2, "top_p": 0.9},
        {"temperature": 0, "stop": ["the"]},
        {"temperature": 1.0, "frequency_penalty": 0.5, "logprobs": 1},
        {"temperature": 1.0, "structured_outputs": {"regex": "[a-z ]{20,40}"}, "ignore_eos": False},
    ]
    return [WANTED | kinds[i % 5] | {"prompt": f"{i} pages and rows " * (1 + 3 * (i % 5))} for i in range(count)]


class Replayed(NamedTuple):
    """What `penstock replay` said."""

    code: int
    lines: list[str]
    errors: str


Replay = Callable[..., Replayed]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """`penstock replay` in this process, which has imported everything already."""

    def run(*arguments: str | Path) -> Replayed:
        capsys.readouterr()
        code = main([*map(str, arguments), "--num-threads", "1"])
        said = capsys.readouterr()
        return Replayed(code, said.out.splitlines(), said.err)

    return run


def other_token(tokens: bytes, position: int = 0) -> bytes:
    """The same int32 ids, but for the one at this position."""
    changed = bytearray(tokens)
    changed[4 * position] ^= 1
    return bytes(changed)


async def test_answers_are_the_same_whatever_happens_and_can_be_replayed(tmp_path: Path, replay: Replay) -> None:
    path = tmp_path / "rec.jsonl"
    flags = (*FLAGS, "--record", path, "--record-prompts")
    looked_at = (SEEDED, GREEDY, CHAT)
    async with serving(*flags) as server, aiohttp.ClientSession() as http:
        alone = [await answer(http, server, body, f"alone-{i}") for i, body in enumerate(looked_at)]
        # Among others: more than there is room for, so that sequences are preempted and recomputed.
        crowd = [asyncio.create_task(answer(http, server, body)) for body in others(14)]
        vectors = http.post(f"{server.url}/v1/embeddings", json={"input": ["a page", "a row of pages"]})
        assert await asyncio.gather(*(answer(http, server, body) for body in looked_at)) == alone
        async with vectors as embedded:
            assert embedded.status == 200, await embedded.text()
        await asyncio.gather(*crowd)
        assert (await server.settled(http))["penstock_num_preemptions_total"] > 0
        # While the worker, and then the scheduler, is killed.
        for process in ("penstock-worker-0", "penstock-scheduler"):
            crowd = [asyncio.create_task(answer(http, server, body)) for body in others(8)]
            again = asyncio.gather(*(answer(http, server, body) for body in looked_at * 2))
            victim, position = server.children()[process], len(server.log)
            async for _ in stream(http, f"{server.url}/v1/completions", GREEDY | {"max_tokens": 400}):
                if victim.is_running():
                    victim.send_signal(signal.SIGKILL)
            assert await again == alone * 2
            await asyncio.gather(*crowd)
            news = "requests resubmitted" if process == "penstock-scheduler" else "worker lost"
            assert any(line["event"].startswith(news) for line in server.log[position:])
        async with http.get(f"{server.url}/version") as response:
            version = await response.json()
        assert {fingerprint for _, fingerprint in alone} == {version["system_fingerprint"]}
        assert version["system"]["batch_invariant"] is True
        assert version["system"]["kernels"] == "native"
        assert (await server.metrics(http))["penstock_engine_recording_lines_lost_total"] == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    recording = Recording.read(path)
    assert len(recording.runs) == 2  # the scheduler was killed once
    assert recording.num_damaged <= 1
    assert len(recording.runs[0].workers) == 2

    whole = replay(path, "--json")
    assert whole.code == 0, whole
    outcomes = [json.loads(line) for line in whole.lines]
    assert sum(outcome["verdict"] == "equal" for outcome in outcomes) > 40
    skipped = [outcome["why"] for outcome in outcomes if outcome["verdict"] == "skipped"]
    assert skipped.count(NO_VECTORS) == 2
    assert set(skipped) <= {NO_VECTORS, "its end is not recorded", "it ended before its first token (abort)"}
    other = replay(path, "--max-num-seqs", "3", "--max-num-batched-tokens", "24", "--no-enable-prefix-caching")
    assert len(other.lines) == len(outcomes)
    assert other.code == 0, other
    one = replay(path, "--request", "cmpl-alone-0", "--at-recorded-times")
    assert one.code == 0, one
    assert [line.split()[0] for line in one.lines] == ["equal"]
    plans = replay(path, "--plans", "--json")
    assert plans.code == 0, plans
    assert len(plans.lines) > 30

    # The first run alone, in which sequences were preempted and a worker died; and a step of it that was not as told.
    text = path.read_bytes()
    first = tmp_path / "first.jsonl"
    first.write_bytes(text[: text.index(b'{"kind":"header"', 1)])
    plans = replay(first, "--plans")
    assert plans.code == 0, plans
    steps = [json.loads(line) for line in first.read_bytes().splitlines() if b'"result"' in line]
    told = next(each["token_ids"] for each in steps[100:] if len(each["token_ids"]) > 12)
    first.write_bytes(first.read_bytes().replace(told.encode(), b64encode(other_token(b64decode(told)))))
    [wrong] = [line for line in replay(first, "--plans").lines if line.startswith("differs")][:1]
    assert "got token" in wrong

    # Another output than the one that was recorded is found, and its place is told.
    run = Recording.read(path).runs[0]
    [changed] = [request for name, request in run.requests.items() if name.endswith(":alone-0")]
    tokens = changed.ends[0].token_ids
    path.write_bytes(text.replace(b64encode(tokens), b64encode(other_token(tokens, 20)), 1))
    different = replay(path, "--request", "alone-0")
    assert different.code == 1
    assert "at position 20 of 160 there was token" in different.lines[0]


def test_a_recording_without_prompts_says_what_is_missing(tmp_path: Path, replay: Replay) -> None:
    path = tmp_path / "rec"
    driver = RecordedDriver(path)
    driver.add(make_request("f:1:a", [1, 2, 3]))
    driver.run()
    driver.recorder.close()
    for arguments in ((), ("--plans",), ("--request", "a")):
        refused = replay(path, *arguments)
        assert refused.code == 2
        assert "record with --record-prompts" in refused.errors
    nothing = replay(path, "--request", "nobody")
    assert nothing.code == 2
    assert "no such request" in nothing.errors


def test_plans_need_a_run_from_its_beginning(tmp_path: Path, replay: Replay) -> None:
    path = tmp_path / "rec"
    driver = RecordedDriver(path, record_prompts=True)
    driver.add(make_request("a", [1, 2, 3]))
    driver.run()
    driver.recorder.close()
    path.write_bytes(path.read_bytes().replace(b'"part":0', b'"part":1'))
    refused = replay(path, "--plans")
    assert refused.code == 2
    assert "from its beginning" in refused.errors


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a text")
    for file in ("none", "notes"):
        command = [sys.executable, "-m", "penstock.cli", "replay", str(tmp_path / file)]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert refused.returncode == 2
        assert refused.stderr.startswith("penstock replay: ")
        assert len(refused.stderr.splitlines()) == 1
