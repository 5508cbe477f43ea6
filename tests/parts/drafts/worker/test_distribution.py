"""With each drafter, sampled tokens have the model's distribution, which is known exactly for a tiny vocabulary."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from penstock.ipc.messages import SamplingParams
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.faults.soak import sized
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.drafters import DRAFTERS, speculative

VOCAB_SIZE, NUM_NEW = 8, 4
NUM_SEQUENCES = sized(1000, 25_000)
TEMPERATURE = 0.7
PROMPT = [3, 4, 5, 3, 4, 6, 3, 4]
_P999 = {7: 24.3, 63: 103.4}
"""Chi-square that a true distribution exceeds once in a thousand times, by degrees of freedom."""


@torch.inference_mode()
def probabilities(model: transformers.PreTrainedModel, num_tokens: int) -> torch.Tensor:
    """[V] * num_tokens: of all continuations of the prompt."""
    texts = torch.tensor([[*PROMPT, *each] for each in product(range(VOCAB_SIZE), repeat=num_tokens)])
    steps = (model(texts).logits[:, len(PROMPT) - 1 : -1].double() / TEMPERATURE).log_softmax(-1)
    chosen = steps.gather(-1, texts[:, len(PROMPT) :, None])
    whole: torch.Tensor = chosen.sum((1, 2)).exp().view([VOCAB_SIZE] * num_tokens)
    return whole


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def texts_of(engine: Engine, sampling: list[SamplingParams]) -> list[list[int]]:
    """As many at a time as may wait."""
    lots = [sampling[i : i + 1000] for i in range(0, len(sampling), 1000)]
    return [each[0] for lot in lots for each in engine.run([PROMPT] * len(lot), lot)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_is_the_models(checkpoint: Callable[..., Checkpoint], tmp_path: Path, name: str) -> None:
    """Token by token, in pairs that follow each other, and against plain decoding with the same seeds."""
    folder, model = checkpoint("llama", vocab_size=VOCAB_SIZE, initializer_range=0.05)
    options = schedule(4096, 16, 1, num_tokens=64 * 32) | {"max_num_seqs": 64}
    sampling = [SamplingParams(max_tokens=NUM_NEW, temperature=TEMPERATURE, seed=i) for i in range(NUM_SEQUENCES)]
    engine = Engine(folder, speculative_config=speculative(name, model, tmp_path), **options)
    drafting_of(engine.scheduler).lengths = FixedLengths(engine.hello.max_drafts)
    texts = texts_of(engine, sampling)
    assert texts == texts_of(Engine(folder, **options), sampling)
    exact = probabilities(model, NUM_NEW)
    for place in range(NUM_NEW):
        others = [other for other in range(NUM_NEW) if other != place]
        counts = Counter(text[place] for text in texts)
        drawn = torch.tensor([float(counts[token]) for token in range(VOCAB_SIZE)])
        assert chi_square(drawn, NUM_SEQUENCES * exact.sum(others)) < _P999[7], place
    pairs = Counter((text[1], text[2]) for text in texts)
    drawn = torch.tensor([[float(pairs[a, b]) for b in range(VOCAB_SIZE)] for a in range(VOCAB_SIZE)])
    assert chi_square(drawn, NUM_SEQUENCES * exact.sum((0, 3))) < _P999[63]
