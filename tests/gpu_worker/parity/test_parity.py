"""Greedy output equals transformers' token for token in fp32, whatever the architecture and the schedule."""

from collections.abc import Callable

import pytest
import torch
import transformers

from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.gpu_worker.state.kv_pool import page_groups
from penstock.ipc.messages import SamplingParams
from tests.faults.soak import IS_SOAK
from tests.gpu_worker.checkpoints import CONFIGS, TRAINED_LEN, greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule

Make = Callable[..., Checkpoint]

NUM_NEW = 64
PROMPTS = prompts((1, 2, 15, 16, 17, 60, 133, 300))
LONGEST = 300 + NUM_NEW
ROOMY = 6400
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
SAFE_GAP = 2e-5
"""Two logits closer than this could change places by rounding alone: then the test needs another seed."""


SPREAD = [
    schedule(4096, 16, 0, num_tokens=ROOMY),
    schedule(16, 1, 2, num_tokens=ROOMY, cached=True),
    schedule(4096, 64, 1, num_tokens=LONGEST + 40),
]
"""For every checkpoint, by default each on one kind of kernels; the last pool holds little more than the longest
sequence."""


def check_greedy(model: transformers.PreTrainedModel, outputs: list[list[list[int]]]) -> None:
    for prompt, sequences in zip(PROMPTS, outputs, strict=True):
        for output in sequences:
            assert len(output) == NUM_NEW
            errors, gap = greedy_errors(model, prompt, output)
            assert not errors, f"prompt of {len(prompt)}: wrong at outputs {errors[:5]}"
            assert gap > SAFE_GAP


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_checkpoint_alone_and_together(checkpoint: Make, name: str, kernels: str) -> None:
    folder, model = checkpoint(name)
    for options in SPREAD if IS_SOAK else SPREAD[1:] if kernels == "native" else SPREAD[:1]:
        num_groups = len(page_groups(load_model_config(folder), options["page_size"]))
        options = options | {"num_pages": options["num_pages"] * num_groups}
        engine = Engine(folder, cpu_kernels=kernels, **options)
        together = engine.run(PROMPTS, GREEDY)
        check_greedy(model, together)
        if options["pipeline_depth"] == 1:
            assert engine.scheduler.stats().num_preemptions > 0
    if not IS_SOAK:
        return
    engine = Engine(folder, cpu_kernels=kernels, **SPREAD[0])
    alone = [engine.run([prompt], GREEDY)[0] for prompt in PROMPTS]
    check_greedy(model, alone)


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
