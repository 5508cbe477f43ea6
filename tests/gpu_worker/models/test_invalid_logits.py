"""A model whose logits are NaN ends the sequences concerned and counts them; the others go on. (The log:
tests/core/engine/test_engine.py.)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.ipc.messages import SamplingParams, SequenceDelta
from tests.gpu_worker.checkpoints import make_checkpoint
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine

Make = Callable[..., Checkpoint]

BROKEN = 17  # the token whose embedding is NaN: who has read it has NaN logits from then on
GOOD = [[5, 6, 7, 8], [30, 31, 32], [9] * 40]
BAD = [[5, 6, BROKEN, 8], [BROKEN], [9] * 39 + [BROKEN]]
KINDS = {
    "greedy": SamplingParams(max_tokens=12, temperature=0.0, logit_bias=((BROKEN, -100.0),)),
    "filtered": SamplingParams(
        max_tokens=12,
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        seed=3,
        repetition_penalty=1.2,
        logit_bias=((BROKEN, -100.0),),
    ),
    "told": SamplingParams(
        max_tokens=12, temperature=0.8, seed=3, num_logprobs=3, prompt_logprobs=2, logit_bias=((BROKEN, -100.0),)
    ),
}


class Listener(Engine):
    """Keeps the errors that sequences end with."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.errors: dict[str, SequenceDelta] = {}

    def _take(self, delta: SequenceDelta) -> None:
        if delta.finish_reason == "error":
            self.errors[delta.request_id] = delta
        else:
            super()._take(delta)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint one of whose embeddings is NaN."""
    folder = tmp_path_factory.mktemp("broken")
    make_checkpoint(folder, "llama")
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_only_those_sequences_end(broken: Path, kernels: str, depth: int, kind: str) -> None:
    engine = Listener(broken, cpu_kernels=kernels, pipeline_depth=depth)
    expected = engine.run(GOOD, KINDS[kind])
    assert not engine.errors
    good = [engine.add(prompt, KINDS[kind]) for prompt in GOOD]
    bad = [engine.add(prompt, KINDS[kind]) for prompt in BAD]
    engine.drain()
    assert [[engine.outputs[name, 0]] for name in good] == expected
    assert sorted(engine.errors) == sorted(bad)
    for delta in engine.errors.values():
        assert delta.error_code == "invalid_logits"
        assert "not finite numbers" in delta.error
    assert all(not engine.outputs[name, 0] for name in bad)
    assert engine.scheduler.stats().num_invalid_logits == len(BAD)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_limits_that_leave_nothing(broken: Path, kernels: str) -> None:
    """No token is both allowed and not a stop token that min_tokens forbids."""
    engine = Listener(broken, cpu_kernels=kernels)
    sampling = SamplingParams(max_tokens=5, temperature=0.0, min_tokens=2, stop_token_ids=(2,), allowed_token_ids=(2,))
    name = engine.add([5, 6], sampling)
    engine.drain()
    assert engine.errors[name].error_code == "invalid_logits"
    assert "minus infinity" in engine.errors[name].error
