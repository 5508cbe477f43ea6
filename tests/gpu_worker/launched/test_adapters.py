"""Rows with adapters on a GPU: tokens equal those of the merged models, whatever else is in the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.gpu_worker.steps import mixed_graphs
from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.counted_graphs import Counted
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds
from tests.parts.adapters.test_parity import load
from tests.parts.adapters.written import write_adapter

Make = Callable[..., Checkpoint]

PROMPTS = prompts((13, 2), seed=4)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def without_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the interpreter minutes."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)


@pytest.mark.parametrize("are_named", [True, False])
def test_rows_of_many_adapters(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_named: bool
) -> None:
    """Two of different ranks take turns in one slot, beside rows of the model, in chunks and decodes.

    If options name some, steps with their rows are captured, too, whichever adapters these rows have.
    """
    folder, model = checkpoint("llama")
    merged = {"": model}
    written = {f"{rank}": write_adapter(tmp_path / f"{rank}", model, rank, seed=rank) for rank in (3, 33)}
    without_warm_up(monkeypatch)
    monkeypatch.setattr(mixed_graphs, "_NUM_TOKENS", (8, 16))
    monkeypatch.setattr(mixed_graphs, "_NUM_ROWS", (2,))
    use_fake_cuda(monkeypatch)
    options: dict[str, Any] = schedule(16, 4, 1, num_tokens=400) | {"max_num_seqs": 4, "max_loras": 1}
    if are_named:
        options["lora"] = (f"3={tmp_path / '3'}",)
    engine = Engine(folder, device="cuda", **options)
    for name, its in written.items():
        merged[load(engine, name, tmp_path / name)] = its
    counted = Counted(monkeypatch)
    asks = [(prompt, key) for prompt in PROMPTS for key in merged]
    ids = [engine.add(prompt, GREEDY, adapter=key) for prompt, key in asks]
    engine.drain()
    monkeypatch.undo()  # transformers' tensors are no CUDA tensors
    for (prompt, key), request_id in zip(asks, ids, strict=True):
        assert greedy_errors(merged[key], prompt, engine.outputs[request_id, 0])[0] == []
    assert (counted.num_without == 0) == are_named


@pytest.mark.parametrize("name", ["llama-mqa-biases", "qwen3"])
def test_in_half_precision(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Matrices have the dtype of activations."""
    folder, model = checkpoint(name)
    merged = write_adapter(tmp_path / "one", model, 5, ("q_proj", "o_proj", "up_proj"))
    without_warm_up(monkeypatch)
    use_fake_cuda(monkeypatch)
    monkeypatch.setattr("penstock.gpu_worker.startup.loaded.choose_dtype", lambda *_, **__: torch.float16)
    engine = Engine(folder, device="cuda", enforce_eager=True, **schedule(24, 16, 0, num_tokens=400))
    key = load(engine, "one", tmp_path / "one")
    request_id = engine.add(PROMPTS[0], GREEDY, adapter=key)
    engine.drain()
    monkeypatch.undo()
    [first, *_] = engine.outputs[request_id, 0]
    with torch.inference_mode():
        logits = merged(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert logits.max() - logits[first] < 0.05


@pytest.mark.parametrize("are_named", [True, False])
def test_warm_up_meets_every_kind_of_launch(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_named: bool
) -> None:
    """Whatever ranks come, in steps of few tokens, some or many: nothing is compiled anew."""
    folder, model = checkpoint("llama")
    for rank in (1, 40):
        write_adapter(tmp_path / f"{rank}", model, rank)
    use_fake_cuda(monkeypatch)
    kinds = recorded_kinds(monkeypatch)  # without running the kernels
    options: dict[str, Any] = schedule(400, 16, 1, num_tokens=1600) | {"max_num_seqs": 4, "max_loras": 2}
    if are_named:
        options["lora"] = (f"1={tmp_path / '1'}",)
    engine = Engine(folder, device="cuda", **options)
    known = set(kinds)
    assert len([kind for kind in known if kind.startswith("shrink_kernel")]) >= 3
    kinds.clear()
    for rank in (1, 40):
        key = load(engine, f"{rank}", tmp_path / f"{rank}")
        for length in (1, 20, 33, 60, 129, 300):
            engine.add(prompts((length,))[0], GREEDY, adapter=key)
            engine.drain()
    assert not set(kinds) - known
