"""In a pipeline each stage has the matrices of its layers, and refuses what is wrong with these."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from penstock.ipc.messages import Message
from penstock.parts.adapters.messages import PrepareAdapter
from penstock.parts.adapters.scheduler import AdapterGate
from penstock.parts.adapters.worker.rows import AdapterRows
from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.parallel.stages_in_process import StagedEngine
from tests.parts.adapters.test_parity import PROMPTS, assert_greedy, gate_of, load, run
from tests.parts.adapters.written import change_tensors, write_adapter

__all__ = ["checkpoint", "one_thread"]
Make = Callable[..., Checkpoint]


class Staged(StagedEngine):
    """All stages are asked for adapters, and their answers become one, as in an engine with real processes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, num_stages=2, **options)
        self.each = [part for stage in self.stages.started for part in stage.parts if isinstance(part, AdapterRows)]
        assert len(self.each) == 2
        [(_, made)] = AdapterGate.answers
        self._of_all = made()

    def _order(self, *, before_plan: bool) -> None:
        for message in self.scheduler.take_messages(before_plan=before_plan):
            for part in self.each:
                part.order(cast(PrepareAdapter, message))

    def _answers(self) -> list[Message]:
        given = [
            self._of_all.take(stage.hello, message)
            for stage, part in zip(self.stages.started, self.each, strict=True)
            for message in part.take_done()
        ]
        return [answer for answer in given if answer is not None]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_matrices_of_all_layers_or_of_one_stage(checkpoint: Make, tmp_path: Path, kernels: str) -> None:
    """Each rank is told as a whole: the larger one of two stages."""
    folder, model = checkpoint("llama")
    engine = Staged(folder, cpu_kernels=kernels)
    merged = {"": model}
    for name, layers in (("all", "01"), ("first", "0"), ("last", "1")):
        its = write_adapter(tmp_path / name, model, 6, [f"layers.{layer}" for layer in layers])
        merged[load(engine, name, tmp_path / name)] = its
    asks = [(prompt, key) for prompt in PROMPTS for key in merged]
    for (prompt, key), output in zip(asks, run(engine, asks), strict=True):
        assert_greedy(merged[key], prompt, output)
    assert [known.rank for known in gate_of(engine).known.values()] == [6, 6, 6]
    engine.close()


def test_each_stage_looks_at_its_own(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    engine = Staged(folder, cpu_kernels="native")
    errors = {}
    for layer in (0, 1, 2):

        def change(tensors: dict[str, torch.Tensor], layer: int = layer) -> None:
            for half, size in (("A", (4, 64)), ("B", (64, 4))):
                name = f"base_model.model.model.layers.{layer}.input_layernorm.lora_{half}.weight"
                tensors[name] = torch.zeros(size)

        write_adapter(tmp_path / f"{layer}", model)
        change_tensors(tmp_path / f"{layer}", change)
        key = load(engine, f"{layer}", tmp_path / f"{layer}")
        engine.make_ready()
        errors[layer] = gate_of(engine).known[key].error
    for layer, error in errors.items():
        assert f"it changes 'model.layers.{layer}.input_layernorm'" in error
    engine.close()
