"""Pictures with the Triton kernels and the CUDA branches: greedy tokens, log-probabilities, kinds of launches."""

from pathlib import Path

import pytest

from tests.faults.soak import IS_SOAK
from tests.gpu_worker.engine_in_process import schedule
from tests.gpu_worker.families.eyes import EYES
from tests.gpu_worker.families.run import NUM_NEW
from tests.gpu_worker.families.test_images import Seeing, SeeingReference, prompts
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda
from tests.gpu_worker.launched.launch_kinds import recorded_kinds


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers stop within layers."""
    for limit in ("_PART", "_PART_NUMBERS"):
        monkeypatch.setattr(f"penstock.gpu_worker.models.vision.tower.{limit}", 1)


_OF_PICTURES = {
    "gemma3": "SEES_AHEAD=True",
    **dict.fromkeys(("qwen2-vl", "qwen2.5-vl", "qwen3-vl"), "HAS_POSITIONS=False"),
}
"""What only prompts with pictures launch."""


@pytest.mark.parametrize("name", EYES if IS_SOAK else ["gemma3"])
def test_greedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several chunks, some with pictures whose positions see each other, beside a text."""
    for name_of_it in ("warm_up", "warm_up_parts"):  # they take minutes
        monkeypatch.setattr(f"penstock.gpu_worker.startup.start.{name_of_it}", lambda runner, limits: 0)
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


@pytest.mark.parametrize("name", EYES if IS_SOAK else ["gemma3", "qwen3-vl"])
def test_warm_up_meets_every_kind_of_launch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures alone and beside texts, in chunks of all sizes, ask for nothing that would be compiled anew."""
    known = prompts(name)
    folder = SeeingReference(tmp_path, name, known).folder
    use_fake_cuda(monkeypatch)
    kinds = recorded_kinds(monkeypatch)  # without running the kernels
    shape = schedule(100, 16, 1, num_tokens=3200)
    engine = Seeing(folder, known, device="cuda", model_impl="own", max_num_seqs=4, **shape)
    met = set(kinds)
    kinds.clear()
    for batch in ([known[0]], known):
        engine.answers([prompt.ids for prompt in batch])
    special = _OF_PICTURES.get(name, "")
    assert any(special in kind for kind in kinds)
    assert not set(kinds) - met
