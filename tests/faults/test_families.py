"""A worker dies while it generates: streams of every family go on with the tokens that `transformers` gives."""

import asyncio
from pathlib import Path

import pytest

from penstock.ipc.faults import FAULTS, ONCE
from tests.e2e.checkpoints import make_tokenizer
from tests.e2e.servers import serving, stream
from tests.faults.soak import IS_SOAK
from tests.faults.streams import client, spare_is_there
from tests.gpu_worker.checkpoints import greedy_errors
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import texts_of
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.families.test_parity_of_families import is_ours

_FIRST_OF_TYPES = {case.model_type: name for name, case in reversed(CASES.items()) if is_ours(name)}
NAMES = sorted(_FIRST_OF_TYPES.values()) if IS_SOAK else ("gpt_oss",)
FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--spare-worker", "--max-num-batched-tokens", "24")
KILLS = "worker.step:kill@3,worker.computed:kill@12"  # in a prompt's chunk, and between decodes
NUM_NEW = 16


@pytest.mark.parametrize("name", NAMES)
async def test_streams_survive_workers(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    case = CASES[name]._replace(changes={**CASES[name].changes, "vocab_size": make_tokenizer(folder)})
    reference, texts = Reference(folder, case), texts_of(case)
    async with (
        serving(folder, *FLAGS, **{FAULTS: KILLS, ONCE: str(tmp_path)}) as server,
        client() as http,
    ):
        await spare_is_there(server)

        async def tokens(text: list[int]) -> list[int]:
            body = {"model": "m", "prompt": text, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
            events = stream(http, f"{server.url}/v1/completions", body | {"return_token_ids": True})
            return [token async for event in events for token in event["choices"][0].get("token_ids") or []]

        answers = await asyncio.gather(*map(tokens, texts))
        assert sum(entry["event"] == "process exited, restarting" for entry in server.log) == 2
    for text, answer in zip(texts, answers, strict=True):
        assert len(answer) == NUM_NEW
        assert greedy_errors(reference.model, text, answer)[0] == []
