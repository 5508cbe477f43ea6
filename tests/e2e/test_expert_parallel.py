"""Experts spread over two workers behind a server: what each computed is told, and places them at the next start."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import torch
import transformers

from tests.e2e.checkpoints import make_tokenizer
from tests.e2e.servers import Server, serving, start

PROMPT, NUM_TOKENS = [40, 41, 42, 43], 24
SPREAD = ("--dtype", "float32", "--num-pages", "200", "--tensor-parallel-size", "2", "--enable-expert-parallel")


def make_mixture(folder: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=make_tokenizer(folder), hidden_size=64, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.12,
        num_local_experts=6, num_experts_per_tok=2, eos_token_id=2, bos_token_id=1, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(folder)


async def complete(http: aiohttp.ClientSession, server: Server) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    async with http.post(f"{server.url}/v1/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
    return str(answer["choices"][0]["text"])


async def load_of(http: aiohttp.ClientSession, server: Server, tokens: int) -> dict[str, Any]:
    """Wait until so many tokens of each layer are told: a worker tells of them now and then."""
    found: dict[str, Any] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            while {sum(counts) for counts in found.get("layers", {}).values()} != {tokens}:
                async with http.get(f"{server.url}/debug/expert_load") as response:
                    found = await response.json()
                await asyncio.sleep(0.2)
    assert {layer: sum(counts) for layer, counts in found["layers"].items()} == dict.fromkeys(("0", "1"), tokens)
    return found


async def metrics_with(http: aiohttp.ClientSession, server: Server, *names: str) -> None:
    """Wait for the figures that come with the scheduler's next message."""
    async with asyncio.timeout(60):
        while True:
            async with http.get(f"{server.url}/metrics") as response:
                metrics = await response.text()
            if all(name in metrics for name in names):
                return
            await asyncio.sleep(0.2)


async def test_loads_are_told_and_place_experts(tmp_path: Path) -> None:
    folder, file = tmp_path / "mixture", tmp_path / "load.json"
    folder.mkdir()
    make_mixture(folder)
    async with serving(folder, *SPREAD) as server, aiohttp.ClientSession() as http:
        text = await complete(http, server)
        # Each position but that of the last token goes to two experts of each layer.
        load = await load_of(http, server, 2 * (len(PROMPT) + NUM_TOKENS - 1))
        await metrics_with(
            http, server, 'penstock_expert_tokens_total{rank="1"}', 'penstock_expert_imbalance{layer="0"}'
        )
    file.write_text(json.dumps(load))
    placed = ("--expert-load", file, "--num-redundant-experts", "2")
    async with serving(folder, *SPREAD, *placed) as server, aiohttp.ClientSession() as http:
        file.unlink()  # who is restarted reads what there was at the start
        assert await complete(http, server) == text
        server.children()["penstock-worker-1"].kill()
        await server.logged("worker connected", after=len(server.log))
        assert await complete(http, server) == text


async def test_refused_before_a_process_starts(tmp_path: Path) -> None:
    folder = tmp_path / "mixture"
    folder.mkdir()
    make_mixture(folder)
    process = await start(folder, *SPREAD, "--num-redundant-experts", "7")
    assert process.stderr is not None
    said = (await process.stderr.read()).decode()
    assert await process.wait() == 2
    assert "--num-redundant-experts is 7; with 6 experts on 2 ranks it may be at most 6" in said
