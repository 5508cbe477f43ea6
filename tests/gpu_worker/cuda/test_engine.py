"""The engine on a GPU against transformers: fp32 token for token, bf16 wherever the two best logits are apart."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import check
from tests.gpu_worker.families.schedules import PAIRWISE
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.families.test_parity_of_families import is_ours

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

Make = Callable[..., Checkpoint]

NUM_NEW = 32
PROMPTS = prompts((1, 2, 15, 16, 17, 60, 133, 300))
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
NAMES = ["llama", "llama-dynamic", "llama-llama3", "llama-mqa-biases", "mistral-window", "qwen3", "qwen3-layer-types"]
FEW = [
    "llama", "qwen3", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v2-lite", "jamba", "mamba2", "qwen3_next",
    "falcon_h1", "kimi_linear", "llama4-chunks", "phi3-longrope-long", "gpt2",
]  # fmt: skip
"""Families that together have every kind of layer; the others are marked as long."""
BF16_ERROR = 0.06
"""Of the largest logit: how far bf16 may move two logits of these models against one another."""


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_equals_transformers(checkpoint: Make, name: str, eager: bool) -> None:
    """Chunks of 64 tokens beside decodes; with graphs, batches of every size are padded."""
    folder, model = checkpoint(name)
    engine = Engine(folder, device="cuda", dtype="float32", enforce_eager=eager, **schedule(64, 16, 1, num_tokens=6400))
    for prompt, (output,) in zip(PROMPTS, engine.run(PROMPTS, GREEDY), strict=True):
        assert greedy_errors(model, prompt, output)[0] == [], f"prompt of {len(prompt)}"


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 300 + NUM_NEW + 64), (64, 14)])
@pytest.mark.parametrize("depth", [0, 2])
def test_fp32_whatever_the_schedule(checkpoint: Make, page_size: int, num_pages: int, depth: int) -> None:
    """A small pool, and a prefix cache that is hit.

    With pages of one token, sequences are preempted. With large ones, the pool still holds the long prompts' pages when
    these come again.
    """
    folder, model = checkpoint("qwen3")
    options = schedule(48, page_size, depth, num_tokens=num_pages * page_size, cached=True)
    engine = Engine(folder, device="cuda", dtype="float32", **options)
    for _ in range(2):
        for prompt, (output,) in zip(PROMPTS, engine.run(PROMPTS, GREEDY), strict=True):
            assert greedy_errors(model, prompt, output)[0] == [], f"prompt of {len(prompt)}"
    stats = engine.scheduler.stats()
    if page_size == 1:
        assert stats.num_preemptions > 0
        assert stats.num_cached_tokens > 0
    else:
        assert stats.num_cached_tokens == sum((len(prompt) - 1) // page_size * page_size for prompt in PROMPTS)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FEW else pytest.mark.long) for n in CASES if is_ours(n)]
)
def test_fp32_of_every_family(name: str, tmp_path: Path) -> None:
    """Graphs with padded rows; chunks of 8 and 24 tokens, a tight pool, prefix hits."""
    reference = Reference(tmp_path, CASES[name])
    for run in PAIRWISE[:2]:
        check(reference, run, device="cuda", dtype="float32", model_impl="own")


@torch.inference_mode()
def bf16_errors(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> tuple[int, float]:
    """(tokens that are not the reference's best, the widest gap by which one missed it over the largest logit)."""
    logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    missed = (logits.amax(-1) - chosen) / logits.abs().amax(-1)
    return int((missed > 0).sum()), float(missed.max())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_bf16_equals_transformers_but_for_near_ties(checkpoint: Make, name: str, eager: bool) -> None:
    folder, model = checkpoint(name)
    rounded = copy.deepcopy(model).bfloat16().float()  # the weights that the engine has
    engine = Engine(
        folder, device="cuda", dtype="bfloat16", enforce_eager=eager, **schedule(64, 16, 1, num_tokens=6400)
    )
    num_errors = 0
    for prompt, (output,) in zip(PROMPTS, engine.run(PROMPTS, GREEDY), strict=True):
        found, widest = bf16_errors(rounded, prompt, output)
        assert widest < BF16_ERROR
        num_errors += found
    assert num_errors < 0.1 * NUM_NEW * len(PROMPTS)
