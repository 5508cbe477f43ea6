"""Greedy output equals transformers' token for token in fp32, whatever the architecture and the schedule."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import transformers

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import CONFIGS, TRAINED_LEN, greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine

Make = Callable[..., Checkpoint]

NUM_NEW = 64
PROMPTS = prompts((1, 2, 15, 16, 17, 60, 133, 300))
LONGEST = 300 + NUM_NEW
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
SAFE_GAP = 2e-5
"""Two logits closer than this could change places by rounding alone: then the test needs another seed."""


def pool(page_size: int, num_tokens: int) -> int:
    return -(-num_tokens // page_size)


def settings(budget: int, page_size: int, depth: int, *, cached: bool = False, tight: bool = False) -> dict[str, Any]:
    num_tokens = LONGEST + 40 if tight else 6400
    return {
        "max_num_batched_tokens": budget,
        "page_size": page_size,
        "pipeline_depth": depth,
        "enable_prefix_caching": cached,
        "num_pages": pool(page_size, num_tokens),
    }


SPREAD = [
    settings(4096, 16, 0),
    settings(16, 1, 2, cached=True),
    settings(4096, 64, 1, cached=True),
    settings(16, 16, 1, tight=True),
]
"""For every checkpoint; the whole grid runs on one."""


def check_greedy(model: transformers.PreTrainedModel, outputs: list[list[list[int]]]) -> None:
    for prompt, sequences in zip(PROMPTS, outputs, strict=True):
        for output in sequences:
            assert len(output) == NUM_NEW
            errors, gap = greedy_errors(model, prompt, output)
            assert not errors, f"prompt of {len(prompt)}: wrong at outputs {errors[:5]}"
            assert gap > SAFE_GAP


@pytest.mark.parametrize("name", CONFIGS)
def test_each_checkpoint_alone_and_together(checkpoint: Make, name: str) -> None:
    folder, model = checkpoint(name)
    for options in SPREAD:
        engine = Engine(folder, **options)
        together = engine.run(PROMPTS, GREEDY)
        check_greedy(model, together)
        if options["num_pages"] * options["page_size"] < 1000:
            assert engine.scheduler.stats().num_preemptions > 0
    engine = Engine(folder, **SPREAD[0])
    alone = [engine.run([prompt], GREEDY)[0] for prompt in PROMPTS]
    check_greedy(model, alone)


@pytest.mark.parametrize(
    ("budget", "page_size", "depth", "cached", "tight"),
    list(product((16, 4096), (1, 16, 64), (0, 1, 2), (False, True), (False, True))),
)
def test_every_schedule_greedy_and_seeded(
    checkpoint: Make, budget: int, page_size: int, depth: int, cached: bool, tight: bool
) -> None:
    """All combinations on one checkpoint, half of the prompts greedy and half seeded, two sequences each."""
    folder, model = checkpoint("llama")
    engine = Engine(folder, **settings(budget, page_size, depth, cached=cached, tight=tight))
    sampling = [GREEDY if i % 2 else seeded(i) for i in range(len(PROMPTS))]
    expected = seeded_alone(checkpoint)
    for attempt in range(2 if cached else 1):
        num_cached_before = engine.scheduler.stats().num_cached_tokens
        outputs = engine.run(PROMPTS, sampling, n=2)
        for i, sequences in enumerate(outputs):
            if i % 2:
                assert sequences[0] == sequences[1]
                assert greedy_errors(model, PROMPTS[i], sequences[0])[0] == []
            else:
                assert sequences == expected[i]
        if attempt and not tight:
            assert (
                engine.scheduler.stats().num_cached_tokens - num_cached_before
                >= 300 // page_size * page_size - page_size
            )
    if tight:
        assert engine.scheduler.stats().num_preemptions > 0
    if not cached:
        assert engine.scheduler.stats().num_cached_pages == 0


def seeded(i: int) -> SamplingParams:
    """Sampling that uses every parameter in some prompt."""
    return SamplingParams(
        max_tokens=NUM_NEW,
        temperature=0.8 + 0.1 * i,
        top_k=(0, 40)[i // 2 % 2],
        top_p=(0.9, 1.0)[i // 4],
        min_p=0.02 if i == 4 else 0.0,
        repetition_penalty=1.2 if i == 2 else 1.0,
        frequency_penalty=0.3 if i == 6 else 0.0,
        presence_penalty=0.2 if i == 0 else 0.0,
        logit_bias=((5, 2.0), (9, -3.0)) if i == 6 else (),
        seed=1234567 * i + 1,
    )


_ALONE: dict[str, list[list[list[int]]]] = {}


def seeded_alone(checkpoint: Make) -> list[list[list[int]]]:
    """What the seeded prompts give one by one at depth 0: two sequences each, with seeds s and s + 1."""
    folder, _ = checkpoint("llama")
    if not _ALONE:
        engine = Engine(folder, **SPREAD[0])
        _ALONE["llama"] = [
            [
                engine.run([prompt], with_seed(seeded(i), seeded(i).seed + j))[0][0] if i % 2 == 0 else []
                for j in range(2)
            ]
            for i, prompt in enumerate(PROMPTS)
        ]
        assert all(first != second for first, second in _ALONE["llama"][::2])
    return _ALONE["llama"]


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | {"seed": seed})


def test_transformers_generate_itself(checkpoint: Make) -> None:
    """The one-pass check above stands for `generate`; here is `generate`."""
    for name in ("qwen3-layer-types", "mistral-window"):
        folder, model = checkpoint(name)
        outputs = Engine(folder).run(PROMPTS[3:6], GREEDY)
        for prompt, output in zip(PROMPTS[3:6], outputs, strict=True):
            ids = torch.tensor([prompt])
            made = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_NEW,
                min_new_tokens=NUM_NEW,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=-1,
            )
            assert made[0, len(prompt) :].tolist() == output[0]


def test_dynamic_scaling_beyond_the_trained_length(checkpoint: Make) -> None:
    """A prompt past the trained length is scaled for its own length: the first token is transformers' own."""
    folder, model = checkpoint("llama-dynamic")
    prompt = prompts((TRAINED_LEN + 200,), seed=3)[0]
    for budget in (64, 4096):
        engine = Engine(folder, max_num_batched_tokens=budget)
        output = engine.run([prompt, PROMPTS[4]], SamplingParams(max_tokens=8, temperature=0.0))
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        assert output[0][0][0] == int(logits.argmax())
        assert greedy_errors(model, PROMPTS[4], output[1][0])[0] == []


def test_stop_and_min_tokens(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama")
    engine = Engine(folder, pipeline_depth=2)
    free = engine.run([PROMPTS[5]], GREEDY)[0][0]
    stop = free[10]
    first = free.index(stop)
    stopped = engine.run([PROMPTS[5]], SamplingParams(max_tokens=NUM_NEW, temperature=0.0, stop_token_ids=(stop,)))[0][
        0
    ]
    assert stopped == free[: first + 1]
    held = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, stop_token_ids=(stop,), min_tokens=first + 5)
    late = engine.run([PROMPTS[5]], held)[0][0]
    assert late[:first] == free[:first]
    assert stop not in late[: first + 5]
