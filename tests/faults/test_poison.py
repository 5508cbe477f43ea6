"""A request that ends every worker which computes it: it alone fails, and the others' streams say what they would."""

import asyncio
from pathlib import Path
from typing import Any

from penstock.ipc.faults import FAULTS
from tests.e2e.servers import Server, serving
from tests.faults.clockwork import expected_tokens, make_clockwork
from tests.faults.soak import only_in_soak, sized
from tests.faults.streams import Told, client, told

POISON = 200
FLAGS = ("--served-model-name", "m", "--spare-worker", "--num-pages", "4096")


def body(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {"model": "m", "temperature": 0, "return_token_ids": True, "prompt": prompt, "max_tokens": num_tokens}


def check_oracle(found: Told, prompt: list[int], num_tokens: int) -> None:
    assert found.tokens == expected_tokens(prompt, num_tokens)
    assert found.ends == ["length", "[DONE]"]


def num_deaths(server: Server) -> int:
    return sum(entry["event"] == "process exited, restarting" for entry in server.log)


async def check_others(server: Server, running: dict[tuple[int, ...], asyncio.Task[Told]], num_tokens: int) -> None:
    for prompt, task in running.items():
        check_oracle(await task, list(prompt), num_tokens)
    assert 2 <= num_deaths(server) <= 7


async def test_one_poison_among_many_fails_alone(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    async with serving(folder, *FLAGS, **{FAULTS: f"worker.step:kill@token={POISON}"}) as server, client() as http:
        prompts: list[tuple[int, ...]] = [(5 + i, 6, 7) for i in range(sized(7, 31))]
        running = {prompt: asyncio.create_task(told(http, server, body(list(prompt), 200))) for prompt in prompts}
        await asyncio.sleep(0.5)
        async with http.post(f"{server.url}/v1/completions", json=body([9, POISON, 7], 20)) as response:
            assert response.status == 500
            assert response.headers["x-should-retry"] == "false"
            assert (await response.json())["error"]["code"] == "request_ends_workers"
        await check_others(server, running, 200)
        await server.settled(http)
        deaths = num_deaths(server)
        for seed in range(3):  # again, as a client would that knows no better: nobody dies of it
            async with http.post(
                f"{server.url}/v1/completions", json=body([9, POISON, 7], 20) | {"seed": seed}
            ) as response:
                assert (await response.json())["error"]["code"] == "request_ends_workers"
        check_oracle(await told(http, server, body([5, 6], 20)), [5, 6], 20)
        assert num_deaths(server) == deaths


@only_in_soak
async def test_a_poisonous_stream_ends_with_an_error_event(tmp_path: Path) -> None:
    """Its step fails with an exception, and it is all alone."""
    folder = make_clockwork(tmp_path / "m", step_seconds=0.01)
    async with serving(folder, *FLAGS, **{FAULTS: f"worker.step:raise@token={POISON}"}) as server, client() as http:
        failed = await told(http, server, body([9, POISON, 7], 20))
        assert failed.ends == ["request_ends_workers"]
        assert not failed.text
        others: dict[tuple[int, ...], asyncio.Task[Told]] = {}
        others[5, 6] = asyncio.create_task(told(http, server, body([5, 6], 20)))
        await check_others(server, others, 20)
        await server.settled(http)
