"""Adapters over real processes: what they say, whoever loaded them, and whatever ends meanwhile."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.adapters import make_adapter
from tests.e2e.checkpoints import greedy
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving, stream

PROMPT = [40, 41, 42, 43, 44, 45]
NUM_TOKENS = 24


async def tokens_of(server: Server, model: str, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Over a connection of its own, which any of the frontends may get."""
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}/v1/completions", json=body) as answer:
        said = await answer.json()
        assert answer.status == 200, said
        found: list[int] = said["choices"][0]["token_ids"]
        return found


async def order(server: Server, what: str, **body: Any) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/v1/{what}_lora_adapter", json=body) as answer,
    ):
        return answer.status, await answer.text()


async def test_whoever_loads_one_all_have_it_and_a_restart_changes_nothing(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    sql = make_adapter(tmp_path / "sql", checkpoint.model, rank=8, seed=1)
    law = make_adapter(tmp_path / "law", checkpoint.model, rank=4, seed=2)
    expected = {
        "base": greedy(checkpoint.model, PROMPT, NUM_TOKENS),
        "sql": greedy(sql, PROMPT, NUM_TOKENS),
        "law": greedy(law, PROMPT, NUM_TOKENS),
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == 3

    async def check() -> None:
        for _ in range(2):  # the second time from the prefix cache
            said = await asyncio.gather(*(tokens_of(server, name) for name in expected for _ in range(4)))
            assert said == [tokens for tokens in expected.values() for _ in range(4)]

    flags = ("--num-frontends", "2", "--data-parallel-size", "2", "--served-model-name", "base", "--dtype", "float32")
    async with serving(checkpoint.folder, *flags, "--lora", f"sql={tmp_path / 'sql'}") as server:
        status, text = await order(server, "load", lora_name="law", lora_path=str(tmp_path / "law"))
        assert status == 200, text
        await check()
        for process in ("scheduler", "worker"):
            victim = next(child for name, child in server.children().items() if process in name)
            saying = asyncio.create_task(check())
            await asyncio.sleep(0.05)  # some of it is under way
            victim.send_signal(signal.SIGKILL)
            await saying
            await check()
        status, text = await order(server, "unload", lora_name="law")
        assert status == 200, text
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/adapter_config.json").write_text((tmp_path / "law/adapter_config.json").read_text())
        (tmp_path / "bad/adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0damaged!")
        status, text = await order(server, "load", lora_name="bad", lora_path=str(tmp_path / "bad"))
        assert status == 400, text
        assert await tokens_of(server, "sql") == expected["sql"]


@pytest.mark.parametrize("aborts", [False, True])
async def test_streams_of_an_adapter_that_is_unloaded_end_as_they_began_or_say_why(
    checkpoint: Checkpoint, tmp_path: Path, aborts: bool
) -> None:
    law = make_adapter(tmp_path / "law", checkpoint.model, rank=4, seed=2)
    num_tokens = 300
    expected = greedy(law, PROMPT, num_tokens)
    async with serving(checkpoint.folder, "--served-model-name", "base", "--dtype", "float32") as server:
        status, text = await order(server, "load", lora_name="law", lora_path=str(tmp_path / "law"))
        assert status == 200, text
        body = {
            "model": "law",
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        tokens, errors, is_served = list[int](), list[Any](), True
        async with aiohttp.ClientSession() as http:
            async for event in stream(http, f"{server.url}/v1/completions", body):
                if "error" in event:
                    errors.append(event["error"])
                    break  # nothing comes behind it
                if is_served:
                    is_served = False
                    assert (await order(server, "unload", lora_name="law", abort=aborts))[0] == 200
                tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        if aborts:
            assert [error["code"] for error in errors] == ["model_not_found"]
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, errors) == (expected, [])


async def test_a_damaged_adapter_of_an_option_harms_nobody_and_its_requests_say_why(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "law", checkpoint.model, rank=4, seed=2)
    (tmp_path / "law/adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0damaged!")
    flags = ("--served-model-name", "base", "--dtype", "float32", "--lora", f"law={tmp_path / 'law'}")
    async with serving(checkpoint.folder, *flags) as server, aiohttp.ClientSession() as http:
        assert await tokens_of(server, "base") == greedy(checkpoint.model, PROMPT, NUM_TOKENS)
        assert "damaged" in (await server.logged("adapter not loaded"))["reason"]
        async with http.post(f"{server.url}/v1/completions", json={"model": "law", "prompt": PROMPT}) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (404, "model_not_found")
            assert "damaged" in error["message"]
