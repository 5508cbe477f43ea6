"""Every family's pooled hidden states are transformers', in fp32, in every schedule, and beside generation."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.ipc.messages import Pooling, SamplingParams, SequenceDelta
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import GREEDY, Scored, engine_of, texts_of
from tests.gpu_worker.families.schedules import IS_LONG, PAIRWISE, Schedule, schedules
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.families.test_parity_of_families import BACKENDS, Find, backends, find

__all__ = ["find"]

TOLERANCE = 2e-4
"""Of numbers that are about 1: the bound of log-probabilities in the other tests, as far as layers may round."""


class Pooled(Scored):
    """Keeps vectors."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.vectors: dict[str, torch.Tensor] = {}

    def _take(self, delta: SequenceDelta) -> None:
        super()._take(delta)
        if delta.pooled:
            assert not delta.token_ids
            assert delta.finish_reason == "stop"
            self.vectors[delta.request_id] = torch.tensor(array("f", delta.pooled))


def pooled(pooling: Pooling) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)


KINDS = (
    Pooling("last", is_normalized=False),
    Pooling("mean", is_normalized=False),
    Pooling("last", 24),
    Pooling("mean", 24),
    Pooling("weighted_mean"),
    Pooling("mean_sqrt_len", is_normalized=False),
)


@torch.inference_mode()
def expected(reference: Reference, text: list[int], pooling: Pooling) -> torch.Tensor:
    base = reference.model.base_model
    base = base.model if base is reference.model else base  # Llama 4's is its own
    hidden = base(torch.tensor([text])).last_hidden_state[0]
    num_tokens = len(text)
    weights = {
        "last": torch.nn.functional.one_hot(torch.tensor(num_tokens - 1), num_tokens).double(),
        "mean": torch.full((num_tokens,), 1 / num_tokens, dtype=torch.float64),
        "mean_sqrt_len": torch.full((num_tokens,), num_tokens**-0.5, dtype=torch.float64),
        "weighted_mean": torch.arange(1, num_tokens + 1, dtype=torch.float64) / (num_tokens * (num_tokens + 1) / 2),
    }
    vector = (weights[pooling.kind] @ hidden.double()).float()[: pooling.size or None]
    return torch.nn.functional.normalize(vector, dim=0) if pooling.is_normalized else vector


def check_pooled(reference: Reference, run: Schedule, **options: Any) -> None:
    """Pool the case's texts in each way, beside one that generates, which must not notice."""
    texts = texts_of(reference.case)
    engine = engine_of(reference, run, options | {"kind": Pooled})
    assert isinstance(engine, Pooled)
    asked = [
        (text, pooling)
        for i, text in enumerate(texts)
        for pooling in (KINDS if run.together else KINDS[i % len(KINDS) :])
    ]
    for _ in range(1 + run.cached):
        beside = engine.add(texts[0], GREEDY)
        ids = []
        for text, pooling in asked:
            ids.append(engine.add(text, pooled(pooling)))
            if not run.together:
                engine.drain()
        engine.drain()
        for request_id, (text, pooling) in zip(ids, asked, strict=True):
            vector, right = engine.vectors[request_id], expected(reference, text, pooling)
            assert vector.shape == right.shape
            assert (vector - right).abs().max() < TOLERANCE * max(1.0, float(right.abs().max())), (
                run,
                pooling,
                len(text),
            )
        assert not reference.errors(texts[0], engine.answer(beside))


RUNS = [(name, backend) for name in CASES for backend in backends(name)]


@pytest.mark.parametrize(("name", "backend"), RUNS if IS_LONG else RUNS[::9])
def test_pooled(find: Find, name: str, backend: str) -> None:
    runs = schedules(list(CASES).index(name) + list(BACKENDS).index(backend))
    for run in runs if IS_LONG and backend != "transformers" else (PAIRWISE if IS_LONG else runs[:1]):
        check_pooled(find(name), run, **BACKENDS[backend])
