"""Rows with adapters get the tokens of the model with the adapter in its weights, whatever else is in the batch."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers

from penstock.config import ConfigError
from penstock.ipc.messages import SamplingParams
from penstock.parts.adapters.keys import key_of
from penstock.parts.adapters.messages import LoadAdapter
from penstock.parts.adapters.scheduler import AdapterGate
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.parts.adapters.written import write_adapter

__all__ = ["checkpoint", "one_thread"]
Make = Callable[..., Checkpoint]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = prompts((1, 45, 17, 70), seed=3)
KERNELS = ("native", "torch")


def gate_of(engine: Engine) -> AdapterGate:
    gate = engine.scheduler.parts.get(AdapterGate)
    assert gate is not None
    return gate


def load(engine: Engine, name: str, folder: Path) -> str:
    """Load what is at a path; its key."""
    try:
        key = key_of(name, str(folder))
    except ConfigError:  # a part of it is not there: the worker says so
        key = f"{name}@none"
    gate_of(engine).load(LoadAdapter(key, str(folder)))
    return key


def run(engine: Engine, asks: Sequence[tuple[list[int], str]]) -> list[list[int]]:
    """Prompts and the keys of their adapters, all at once; outputs."""
    ids = [engine.add(prompt, GREEDY, adapter=adapter) for prompt, adapter in asks]
    engine.drain()
    return [engine.outputs[request_id, 0] for request_id in ids]


def assert_greedy(model: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    assert len(output) == GREEDY.max_tokens
    assert greedy_errors(model, prompt, output)[0] == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("rank", "modules", "config"),
    [
        (1, ("q_proj",), {}),
        (8, ("q_proj", "v_proj"), {}),
        (16, ("o_proj", "down_proj"), {"use_rslora": True}),
        (5, ("k_proj", "gate_proj"), {"alpha_pattern": {"gate_proj": 3}}),
        (64, ("up_proj",), {}),
        (32, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), {}),
    ],
)
def test_each_kind(
    checkpoint: Make, tmp_path: Path, kernels: str, rank: int, modules: Sequence[str], config: dict[str, Any]
) -> None:
    """Beside rows of the model itself, whose bits stay as they are alone."""
    folder, model = checkpoint("llama")
    merged = write_adapter(tmp_path / "one", model, rank, modules, **config)
    engine = Engine(folder, cpu_kernels=kernels, **schedule(32, 16, 1, num_tokens=3200, cached=True))
    alone = run(engine, [(prompt, "") for prompt in PROMPTS])
    key = load(engine, "one", tmp_path / "one")
    asks = [(prompt, adapter) for prompt in PROMPTS for adapter in ("", key)]
    for _ in range(2):  # the second time with what the prefix cache holds
        outputs = run(engine, asks)
        assert outputs[::2] == alone
        for prompt, output in zip(PROMPTS, outputs[1::2], strict=True):
            assert_greedy(merged, prompt, output)
    assert outputs[1::2] != alone


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("budget", "page_size", "num_tokens"), [(16, 1, 3200), (4096, 16, 3200), (16, 16, 150)])
def test_many_adapters_take_turns(
    checkpoint: Make, tmp_path: Path, kernels: str, budget: int, page_size: int, num_tokens: int
) -> None:
    """Five of different ranks with room for two, with a pool that preempts, too."""
    folder, model = checkpoint("llama")
    merged = {"": model}
    engine = Engine(folder, cpu_kernels=kernels, max_loras=2, **schedule(budget, page_size, 1, num_tokens=num_tokens))
    for number, rank in enumerate((2, 4, 8, 3, 16)):
        its = write_adapter(tmp_path / f"{number}", model, rank, seed=number)
        merged[load(engine, f"a{number}", tmp_path / f"{number}")] = its
    asks = [(prompt, key) for prompt in PROMPTS for key in merged]
    for (prompt, key), output in zip(asks, run(engine, asks), strict=True):
        assert_greedy(merged[key], prompt, output)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["qwen3", "llama-mqa-biases", "mistral-window", "llama-mha-tied"])
def test_other_models(checkpoint: Make, tmp_path: Path, name: str, kernels: str) -> None:
    """Biases, other numbers of heads, windows, activations."""
    folder, model = checkpoint(name)
    engine = Engine(folder, cpu_kernels=kernels)
    merged = write_adapter(tmp_path / "one", model)
    key = load(engine, "one", tmp_path / "one")
    for prompt, output in zip(PROMPTS, run(engine, [(prompt, key) for prompt in PROMPTS]), strict=True):
        assert_greedy(merged, prompt, output)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_beside_quantized_weights(checkpoint: Make, tmp_path: Path, quantization: str) -> None:
    """An adapter of zeros changes nothing, and another one does; rows without keep their tokens."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, cpu_kernels="native", quantization=quantization)
    write_adapter(tmp_path / "zeros", model, strength=0.0)
    write_adapter(tmp_path / "one", model)
    alone = run(engine, [(prompt, "") for prompt in PROMPTS])
    keys = [load(engine, name, tmp_path / name) for name in ("zeros", "one")]
    outputs = run(engine, [(prompt, key) for prompt in PROMPTS for key in ("", *keys)])
    assert outputs[::3] == outputs[1::3] == alone
    assert outputs[2::3] != alone


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_like_peft(checkpoint: Make, tmp_path: Path) -> None:
    """What PEFT itself writes, beside what it computes, merged and not."""
    peft = pytest.importorskip("peft")
    folder, model = checkpoint("llama")
    config = peft.LoraConfig(
        r=8, lora_alpha=32, target_modules=["q_proj", "o_proj", "up_proj"], use_rslora=True, rank_pattern={"o_proj": 3},
        init_lora_weights=False,
    )  # fmt: skip
    theirs = peft.get_peft_model(deepcopy(model), config)
    theirs.save_pretrained(tmp_path / "one")
    engine = Engine(folder, cpu_kernels="native")
    key = load(engine, "one", tmp_path / "one")
    outputs = run(engine, [(prompt, key) for prompt in PROMPTS])
    for like in (theirs, theirs.merge_and_unload()):
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_greedy(like, prompt, output)
