"""Families with the Triton kernels and the CUDA branches: greedy tokens, log-probabilities, kinds of launches."""

from pathlib import Path

import pytest

from penstock.ipc.messages import SamplingParams
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.engine_in_process import schedule
from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import Scored
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.families.test_parity_of_families import is_ours
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds

SOME = ("gpt_oss", "qwen3_5_text", "glm_moe_dsa-shared")
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, num_logprobs=0)


@pytest.mark.parametrize("name", [name for name in CASES if is_ours(name)] if IS_SOAK else SOME)
def test_greedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks beside a decode, then both in a graph."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)  # it takes minutes
    reference = Reference(tmp_path, CASES[name])
    device = use_fake_cuda(monkeypatch)
    engine = Scored(tmp_path, device="cuda", model_impl="own", max_num_seqs=2, **schedule(16, 16, 1, num_tokens=400))
    texts = prompts((21, max(8, min(CASES[name].lens))), seed=3)
    answers = engine.answers(texts, GREEDY)
    assert device.num_replays > 0
    monkeypatch.undo()  # transformers' tensors are no CUDA tensors
    for text, answer in zip(texts, answers, strict=True):
        assert len(answer.tokens) == GREEDY.max_tokens
        assert not reference.errors(text, answer)


def test_warm_up_meets_every_kind_of_launch_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts get few rows, some or many; nothing is compiled anew when they do."""
    Reference(tmp_path, Case("mixtral", {"num_local_experts": 16, "num_experts_per_tok": 3}))
    use_fake_cuda(monkeypatch)
    kinds = recorded_kinds(monkeypatch)  # without running the kernels
    engine = Scored(tmp_path, device="cuda", model_impl="own", max_num_seqs=4, **schedule(400, 16, 1, num_tokens=1600))
    known = set(kinds)
    kinds.clear()
    for length in (1, 20, 85, 86, 200, 341, 342, 380):
        engine.answers(prompts((length,)), GREEDY)
    assert len({kind for kind in kinds if kind.startswith("group_rows_kernel")}) == 3
    assert not set(kinds) - known
