"""However a model is spread over processes: streams say what one worker says, also when processes die under them."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.checkpoints import make_checkpoint, make_tokenizer
from tests.e2e.servers import Server, serving
from tests.faults.soak import IS_SOAK, sized
from tests.faults.streams import Told, all_told, bodies, check_equal, client
from tests.gpu_worker.formats import writers
from tests.parts.drafts.worker.eagle_heads import write_eagle, write_head
from tests.parts.drafts.worker.medusa_heads import CONFIG, heads

FLAGS = ("--served-model-name", "m", "--dtype", "float32", "--max-num-batched-tokens", "48", "--num-pages", "300")
DRAFTS = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
LAYOUTS = {
    "TP 2": ("--tensor-parallel-size", "2"),
    "TP 4": ("--tensor-parallel-size", "4"),
    "PP 2": ("--pipeline-parallel-size", "2"),
    "TP 2 x PP 2": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    "EP 2": ("--tensor-parallel-size", "2", "--enable-expert-parallel"),
    "DP 2": ("--data-parallel-size", "2"),
    "DP 2 x TP 2": ("--data-parallel-size", "2", "--tensor-parallel-size", "2"),
    "prefill + decode": ("--data-parallel-size", "2", "--role", "prefill,decode"),
    "drafts": DRAFTS,
    "drafts, TP 2 x PP 2": ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", *DRAFTS),
    "draft model": ("--speculative-config", '{"method": "draft_model", "model": "HERE"}'),
    "EAGLE": ("--speculative-config", '{"method": "eagle", "model": "HERE/eagle"}'),
    "Medusa": ("--speculative-config", '{"method": "medusa", "model": "HERE/medusa", "num_speculative_tokens": 3}'),
    "drafts, prefill + decode": ("--data-parallel-size", "2", "--role", "prefill,decode", *DRAFTS),
}
NUM_STREAMS = sized(12, 64)
NUM_KILLS = sized(2, 12)


def make_mixture(folder: Path) -> None:
    """A random mixture of experts with a tokenizer."""
    folder.mkdir(parents=True)
    sizes: dict[str, Any] = {
        "vocab_size": make_tokenizer(folder),
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 2048,
        "initializer_range": 0.12,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "dtype": "float32",
    }
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).save_pretrained(folder)


def make_quantized(folder: Path) -> None:
    """As `make_checkpoint`, in 4 bits; four ranks have whole groups of them."""
    make_checkpoint(folder, intermediate_size=128)
    writer, stored = writers.gptq(4, 32, has_order=False), dict[str, Tensor]()
    for key, tensor in load_file(folder / "model.safetensors").items():
        stored |= writer.write(key, tensor)[0] if writer.quantizes(key) else {key: tensor}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": writer.config}))


MODELS: dict[str, Callable[[Path], object]] = {
    "dense": make_checkpoint,
    "mixture": make_mixture,
    "quantized": make_quantized,
}
ONLY_DENSE = ("EAGLE", "Medusa")  # their heads are written for it
CASES = [
    (model, layout)
    for model, layout in product(MODELS, LAYOUTS)
    if (model == "mixture" or "EP" not in layout) and (model == "dense" or layout not in ONLY_DENSE)
]
PAIRS = [  # experts over ranks are killed in tests/e2e/test_expert_parallel.py
    ("dense", "DP 2 x TP 2"),
    ("quantized", "drafts, TP 2 x PP 2"),
    ("dense", "prefill + decode"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints, by their names."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make(folder / name)
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder / "dense")
    write_eagle(folder / "dense" / "eagle", dense)
    write_head(folder / "dense" / "medusa", heads(dense), CONFIG)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Callable[[str], list[Told]]:
    """What one worker says, for each checkpoint once."""
    known: dict[str, list[Told]] = {}

    async def ask(name: str) -> list[Told]:
        async with serving(folders[name], *FLAGS) as server, client() as http:
            return await all_told(http, server, bodies(NUM_STREAMS))

    def of(name: str) -> list[Told]:
        if name not in known:
            known[name] = asyncio.run(ask(name))
        return known[name]

    return of


@pytest.mark.parametrize(("model", "layout"), CASES if IS_SOAK else PAIRS)
def test_streams_are_the_same(
    folders: dict[str, Path], expected: Callable[[str], list[Told]], model: str, layout: str
) -> None:
    flags = tuple(flag.replace("HERE", str(folders[model])) for flag in LAYOUTS[layout])
    asyncio.run(_compare(folders[model], flags, expected(model)))


async def _compare(folder: Path, flags: tuple[str, ...], expected: list[Told]) -> None:
    """First undisturbed; then once for each kill of a process other than the frontend, in the middle of the streams."""
    chance = random.Random(0)
    async with serving(folder, *FLAGS, *flags, PENSTOCK_SPARE_WORKER="true") as server, client() as http:
        check_equal(await all_told(http, server, bodies(NUM_STREAMS)), expected)
        await server.settled(http)
        num_events = 30 * NUM_STREAMS
        for _ in range(NUM_KILLS):
            # Later than grammars are prepared: one that was suspected after a kill is prepared alone the next time, on
            # every engine, and a kill meanwhile proves it guilty.
            left = num_events // 4 + chance.randrange(num_events * 3 // 4)
            victim = chance.choice(_victims(server))

            def on_event(victim: str = victim) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(server.children()[victim].pid, signal.SIGKILL)

            num_lines = len(server.log)
            found = await all_told(http, server, bodies(NUM_STREAMS), on_event)
            check_equal(found, expected)
            if left <= 0:
                await server.logged("process exited, restarting", after=num_lines)
            await server.settled(http)
            print(f"{flags}: {victim} killed, longest pause {max(each.gap for each in found):.2f} s")


def _victims(server: Server) -> list[str]:
    names = server.children()
    return sorted(
        name for name in names if name.startswith(("penstock-worker", "penstock-scheduler")) and "spare" not in name
    )
