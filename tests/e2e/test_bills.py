"""What requests cost and why they wait, as told by a server of real processes: to clients, in the log, at /metrics."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import Server, serving, stream
from tests.faults.clockwork import expected_text, make_clockwork

STEP = 0.02  # seconds
PROMPT = [40, 41, 42]
PRICE = 3.6  # an hour: a thousandth for each device second
KEYS = {"alice": "sk-alice-0123456789abcdef", "operator": "sk-operator-0123456789abcdef"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    scopes = {"alice": '["infer"]', "operator": '["infer", "metrics", "admin"]'}
    file.write_text(
        "".join(
            f'[[keys]]\nid = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\nscopes = {scopes[name]}\n'
            for name, key in KEYS.items()
        )
    )
    file.chmod(0o600)
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = make_clockwork(tmp_path_factory.mktemp("clockwork"), step_seconds=STEP)
    flags = (
        "--served-model-name",
        "m",
        "--cpu-kernels",
        "torch",
        "--max-num-seqs",
        "4",
        "--queue-timeout",
        "7",
        "--price-per-hour",
        PRICE,
    )
    async with serving(folder, *map(str, flags), "--api-keys-file", keys) as server:
        yield server


def client(name: str = "alice") -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"authorization": f"Bearer {KEYS[name]}"})


async def totals(server: Server, key: str = "alice") -> dict[str, float]:
    async with client("operator") as http, http.get(f"{server.url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.name.removeprefix("penstock_key_").removesuffix("_total"): sample.value
        for sample in samples
        if sample.name.startswith("penstock_key_") and sample.labels["key"] == key
    }


async def completed(server: Server, num_tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0} | fields
    async with client() as http, http.post(f"{server.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def check(bill: dict[str, Any], num_steps: int) -> None:
    """Of a request that ran alone: each of its steps is its own."""
    assert bill["steps"] == num_steps
    assert num_steps * STEP * 0.9 < bill["device_seconds"] < num_steps * STEP * 30
    assert bill["price"] == pytest.approx(bill["device_seconds"] / 1000)
    assert bill["kv_byte_seconds"] > 0
    assert 0 <= bill["queue_ms"] < 10_000


@pytest.mark.asyncio(loop_scope="module")
async def test_only_who_asks_is_told(server: Server) -> None:
    assert "bill" not in (await completed(server, 4))["usage"]
    await server.logged("request")
    after = len(server.log)
    answer = await completed(server, 8, return_bill=True)
    bill = answer["usage"]["bill"]
    check(bill, 8)
    line = await server.logged("request", after=after)
    assert line["device_ms"] == pytest.approx(bill["device_seconds"] * 1e3, abs=0.01)
    assert (line["key"], line["steps"]) == ("alice", 8)
    assert line["price"] == pytest.approx(bill["price"])


@pytest.mark.asyncio(loop_scope="module")
async def test_each_api_tells(server: Server) -> None:
    messages = [{"role": "user", "content": "abc"}]
    common = {"temperature": 0, "ignore_eos": True, "return_bill": True}
    async with client() as http:
        body = common | {"messages": messages, "max_tokens": 5}
        async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
            check((await response.json())["usage"]["bill"], 5)
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        told = [event async for event in stream(http, f"{server.url}/v1/chat/completions", body | options)]
        check(told[-1]["usage"]["bill"], 5)
        assert all("bill" not in (event["usage"] or {}) for event in told[:-3])
        async with http.post(f"{server.url}/v1/completions", json=body | {"prompt": "a", "stream": True}) as response:
            assert response.status == 400, "a stream without usage has no place for it"
            assert (await response.json())["error"]["param"] == "return_bill"
        body = common | {"input": "abc", "max_output_tokens": 5}
        async with http.post(f"{server.url}/v1/responses", json=body) as response:
            check((await response.json())["usage"]["bill"], 5)
        async with http.post(f"{server.url}/v1/responses", json=body | {"stream": True}) as response:
            assert b'"bill":{"queue_ms"' in await response.read()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stop_string_does_not_hide_the_cost(server: Server) -> None:
    """The frontend finds it, and ends the sequence; the bill has the steps that were in flight then."""
    before = await totals(server)
    text = expected_text(PROMPT, 60)
    stop = next(text[i : i + 2] for i in range(8, 50) if text.index(text[i : i + 2]) == i)
    answer = await completed(server, 60, stop=[stop], n=1, return_bill=True)
    assert answer["choices"][0]["finish_reason"] == "stop"
    bill, num_tokens = answer["usage"]["bill"], answer["usage"]["completion_tokens"]
    assert num_tokens <= bill["steps"] <= num_tokens + 4
    after = await totals(server)
    assert after["device_seconds"] - before["device_seconds"] == pytest.approx(bill["device_seconds"], abs=1e-6)
    assert after["price"] == pytest.approx(after["device_seconds"] / 1000)


@pytest.mark.asyncio(loop_scope="module")
async def test_who_leaves_pays_too(server: Server) -> None:
    before, num_lines = await totals(server), len(server.log)
    async with client() as http:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            for _ in range(6):
                await response.content.readline()
    line = await server.logged("request", after=num_lines)
    assert line["status"] == 499
    told = await server.logged("bill", after=num_lines)
    assert (told["request_id"], told["key"]) == (line["request_id"], "alice")
    assert told["device_ms"] >= 2 * STEP * 1e3 * 0.9
    after = await totals(server)
    assert after["device_seconds"] - before["device_seconds"] == pytest.approx(told["device_ms"] * 1e-3, abs=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_those_who_share_steps_share_their_cost(server: Server) -> None:
    """Several clients at once, some of whom leave: the keys' totals are the steps' times but for a stop's overrun."""

    async def device_seconds() -> tuple[float, float]:
        async with client("operator") as http:
            await server.settled(http)
            engine = (await server.metrics(http))["penstock_engine_device_seconds_total"]
        return (await totals(server))["device_seconds"], engine

    async def leaves() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(6 * STEP):
                await completed(server, 100)

    keys_before, engine_before = await device_seconds()
    answers = await asyncio.gather(
        completed(server, 20, return_bill=True, n=2, prompt=PROMPT * 14),
        completed(server, 30, return_bill=True),
        leaves(),
    )
    keys_after, engine_after = await device_seconds()
    assert keys_after - keys_before == pytest.approx(engine_after - engine_before, abs=1e-5)
    first, second = (answer["usage"]["bill"] for answer in answers[:2])
    assert first["steps"] + second["steps"] == 70
    assert first["device_seconds"] + second["device_seconds"] < keys_after - keys_before
    assert first["saved_tokens"] == 41, "the second sequence starts from its sibling's prompt"


@pytest.mark.asyncio(loop_scope="module")
async def test_why_a_request_waits(server: Server) -> None:
    """All rows are taken for longer than the queue's timeout: who asks is told, and so are the log and the client."""
    num_lines = len(server.log)
    runners = [asyncio.create_task(completed(server, 2000, prompt=[40 + i, 41])) for i in range(4)]
    url = f"{server.url}/debug/requests"
    async with client("operator") as operator, client() as http:
        while True:
            async with operator.get(url, params={"state": "running"}) as response:
                if (await response.json())["num_running"] == 4:
                    break
            await asyncio.sleep(0.05)

        async def wait() -> tuple[int, dict[str, Any]]:
            body, headers = {"prompt": PROMPT, "max_tokens": 4}, {"x-request-id": "waiter"}
            async with http.post(f"{server.url}/v1/completions", json=body, headers=headers) as response:
                return response.status, await response.json()

        waiter = asyncio.create_task(wait())
        found: dict[str, Any] = {"data": []}
        while not found["data"]:
            await asyncio.sleep(0.05)
            async with operator.get(url, params={"id": "waiter"}) as response:
                found = await response.json()
        [waiting] = found["data"]
        assert (found["num_running"], found["num_waiting"], found["has_more"]) == (4, 1, False)
        assert (waiting["id"], waiting["state"], waiting["row"], waiting["tenant"]) == (
            "waiter",
            "waiting",
            None,
            "alice",
        )
        assert waiting["reason"].startswith("no free row: 4 of 4 in use, the next one ends in at most about ")
        async with operator.get(url, params={"limit": "1"}) as response:
            first = await response.json()
        assert first["has_more"]
        assert [each["state"] for each in first["data"]] == ["running"]
        for wrong in ({"limit": "0"}, {"limit": "x"}, {"state": "asleep"}):
            async with operator.get(url, params=wrong) as response:
                assert response.status == 400
        async with http.get(url) as response:
            assert response.status == 403, "clients do not see each other's requests"
        status, answer = await waiter
    assert status == 504
    assert "waited in the queue for more than 7 s; no free row: 4 of 4" in answer["error"]["message"]
    line = await server.logged("request waiting long", after=num_lines)
    assert "waiter" in line["request_id"]
    assert line["reason"].startswith("no free row: 4 of 4 in use")
    async with asyncio.timeout(60):
        while not (told := [each for each in server.log[num_lines:] if "waited_for" in each]):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert told[0]["request_id"] == "waiter"
    assert told[0]["waited_for"].startswith("no free row")
    assert told[0]["queue_ms"] > 6000
    for runner in runners:
        runner.cancel()
    await asyncio.gather(*runners, return_exceptions=True)
