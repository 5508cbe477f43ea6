"""Where a prompt's length decides what positions mean, prompts of different kinds share no cached pages."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.families.case import Case, rope
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import GREEDY, Scored

_TRAINED = 40
_FACTORS: dict[str, Any] = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LONGROPE = Case(
    "phi3",
    {
        "original_max_position_embeddings": _TRAINED,
        **rope("longrope", partial_rotary_factor=1.0, original_max_position_embeddings=_TRAINED, **_FACTORS),
    },
)
DYNAMIC = Case("llama", {"max_position_embeddings": _TRAINED, **rope("dynamic", factor=4.0)})


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_longrope(tmp_path: Path, kernels: str) -> None:
    """A long prompt begins with a short one, another long one with the first."""
    reference = Reference(tmp_path, LONGROPE)
    (text,) = prompts((100,), seed=4)
    engine = Scored(tmp_path, model_impl="own", cpu_kernels=kernels, page_size=4)
    hits = []
    for length in (_TRAINED - GREEDY.max_tokens, 60, 80, 20):
        before = engine.scheduler.stats().num_cached_tokens
        (answer,) = engine.answers([text[:length]])
        assert reference.errors(text[:length], answer) == ""
        hits.append(engine.scheduler.stats().num_cached_tokens - before)
    assert hits == [0, 0, 60, 16]


def test_dynamic(tmp_path: Path) -> None:
    """Each length beyond the trained one is a kind of its own: the first token is that of the prompt alone."""
    reference = Reference(tmp_path, DYNAMIC)
    (text,) = prompts((100,), seed=4)
    engine = Scored(tmp_path, page_size=4)
    answers = [engine.answers([text[:length]])[0] for length in (20, 60, 80, 60)]
    for length, answer in zip((20, 60, 80), answers, strict=False):
        assert answer.tokens[0] == int(reference.logits(text[:length])[-1].argmax())
    assert answers[3].tokens == answers[1].tokens
    assert engine.hello.longest_usual_prompt == _TRAINED
    assert engine.scheduler.stats().num_cached_tokens == 56
