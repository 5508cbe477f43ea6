"""Counts the steps that go through graphs of steps with chunks, and those that are launched kernel by kernel."""

from typing import Any

import pytest

from penstock.gpu_worker.steps import input_batch, mixed_graphs, model_runner


class Counted:
    """How many steps went through graphs of which sizes, and how many through none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[mixed_graphs.GraphSize, int] = {}
        self.num_without = 0
        replay, make_inputs = mixed_graphs.MixedGraphs.replay, input_batch.make_inputs

        def counted(its: mixed_graphs.MixedGraphs, batch: Any, size: mixed_graphs.GraphSize) -> Any:
            self.sizes[size] = self.sizes.get(size, 0) + 1
            return replay(its, batch, size)

        def made(*args: Any) -> Any:
            self.num_without += 1
            return make_inputs(*args)

        monkeypatch.setattr(mixed_graphs.MixedGraphs, "replay", counted)
        monkeypatch.setattr(model_runner, "make_inputs", made)
