"""Pictures with the Triton kernels and the CUDA branches: greedy tokens and log-probabilities."""

from pathlib import Path

import pytest

from tests.faults.soak import IS_SOAK
from tests.gpu_worker.engine_in_process import schedule
from tests.gpu_worker.families.eyes import EYES
from tests.gpu_worker.families.run import NUM_NEW
from tests.gpu_worker.families.test_images import Seeing, SeeingReference, prompts
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda


@pytest.mark.parametrize("name", EYES if IS_SOAK else ["gemma3"])
def test_greedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several chunks, some with pictures whose positions see each other, beside a text."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)  # it takes minutes
    monkeypatch.setattr("penstock.gpu_worker.models.vision.tower._PART", 1)  # towers stop within layers
    known = prompts(name)[1:3]
    reference = SeeingReference(tmp_path, name, known)
    use_fake_cuda(monkeypatch)
    shape = schedule(16, 16, 1, num_tokens=800)
    engine = Seeing(reference.folder, known, device="cuda", model_impl="own", max_num_seqs=2, **shape)
    answers = engine.answers([prompt.ids for prompt in known])
    monkeypatch.undo()  # transformers' tensors are no CUDA tensors
    for prompt, answer in zip(known, answers, strict=True):
        assert len(answer.tokens) == NUM_NEW
        assert not reference.errors(prompt.ids, answer)
