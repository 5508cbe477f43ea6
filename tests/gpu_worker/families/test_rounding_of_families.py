"""In bfloat16 our logits are about as near to those in fp32 as transformers' own are."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from penstock.ipc.messages import SamplingParams, SequenceDelta
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import Scored
from tests.gpu_worker.families.schedules import IS_LONG
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.families.test_parity_of_families import is_ours

_USUAL = ("gemma2", "gpt_oss", "llama4", "phi4-mini", "qwen3_moe")
_NAMES = [name for name in CASES if is_ours(name)] if IS_LONG else _USUAL
_BOUND = 2.0
"""Of our median error, in those of transformers in bfloat16. Tokens that go to other experts have larger ones."""
_SCORES = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


class PromptScores(Scored):
    """Keeps the log-probabilities of prompts."""

    def __init__(self, folder: Path, **options: str) -> None:
        super().__init__(folder, model_impl="own", dtype="bfloat16", **options)
        self.of_prompt: list[float] = []

    def _take(self, delta: SequenceDelta) -> None:
        super()._take(delta)
        if delta.prompt_logprobs is not None:
            self.of_prompt += np.frombuffer(delta.prompt_logprobs.logprobs, np.float32).tolist()


@torch.inference_mode()
def scores(model: transformers.PreTrainedModel, text: list[int]) -> Tensor:
    """The log-probabilities of a text's tokens but the first."""
    logits = model(torch.tensor([text])).logits[0, :-1].float()
    found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    return found


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", _NAMES)
def test_logits_in_bf16(tmp_path: Path, name: str, kernels: str) -> None:
    reference = Reference(tmp_path, CASES[name])
    (text,) = prompts((60,), seed=7)
    expected = scores(reference.model, text)
    engine = PromptScores(tmp_path, cpu_kernels=kernels)
    engine.answers([text], _SCORES)
    ours = (torch.tensor(engine.of_prompt) - expected).abs()
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    theirs = (scores(rounded, text) - expected).abs()
    assert len(ours) == len(theirs) == 59
    assert 0 < float(ours.median()) <= _BOUND * float(theirs.median())
