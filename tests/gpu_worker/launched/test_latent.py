"""Latent attention with its Triton kernels, in both ways: tokens equal transformers'."""

from pathlib import Path
from typing import Any

import pytest

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.case import Case, rope
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import Scored, texts_of
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds

_YARN = {"factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
_SMALL = {"head_dim": 8, "num_key_value_heads": 4, "num_hidden_layers": 2, **rope("yarn", **_YARN)}
_CHOOSING = {
    "first_k_dense_replace": 2,
    "index_head_dim": 24,
    "index_n_heads": 12,
    "index_topk": 70,
    "indexer_types": ["full", "shared"],
}
DENSE = Case("youtu", _SMALL, lens=(30, 14, 15, 1))
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, num_logprobs=0)


def test_greedy_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill beside decodes, a pool that preempts; graphs with padded rows."""
    reference, texts = Reference(tmp_path, DENSE), texts_of(DENSE)
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)
    device = use_fake_cuda(monkeypatch)
    options = schedule(24, 16, 1, num_tokens=64)
    engine = Scored(tmp_path, device="cuda", max_num_seqs=4, **options)
    answers = engine.answers(texts, GREEDY)
    monkeypatch.undo()  # transformers' tensors are no CUDA tensors
    for text, answer in zip(texts, answers, strict=True):
        assert not reference.errors(text, answer)
    assert device.num_replays > 0
    assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", ["youtu", "glm_moe_dsa"])
def test_warm_up_meets_every_kind_of_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nothing that serving launches afterwards would be compiled anew."""
    sizes: dict[str, Any] = {"num_attention_heads": 20, "num_key_value_heads": 20, "v_head_dim": 16}
    sizes |= {"num_hidden_layers": 1} if kind == "youtu" else _CHOOSING
    case = Case(kind, {**_SMALL, **sizes}, lens=(1, 2, 5, 17, 30, 90, 99, 150, 300, 3, 4, 40, 70, 16, 8, 200, 480))
    Reference(tmp_path, case)
    use_fake_cuda(monkeypatch)
    kinds = recorded_kinds(monkeypatch)
    engine = Engine(tmp_path, device="cuda", max_num_seqs=6, **schedule(100, 16, 1, num_tokens=3000, cached=True))
    known = dict(kinds)
    kinds.clear()
    for _ in range(2):
        engine.run(texts_of(case), GREEDY)
    assert kinds
    new = [kind for kind in kinds if kind not in known]
    assert not new, "\n".join(new)
