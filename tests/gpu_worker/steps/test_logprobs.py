"""Log-probabilities equal transformers' (fp32, 1e-4): of outputs and of prompts, however they were computed."""

from array import array
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import transformers
from msgspec.structs import replace
from torch import Tensor

from penstock.gpu_worker.steps import logprobs
from penstock.ipc.messages import SamplingParams, SequenceDelta, TokenLogprobs
from tests.gpu_worker.checkpoints import VOCAB_SIZE, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule

Make = Callable[..., Checkpoint]

NUM_NEW = 24
PROMPTS = prompts((1, 2, 33, 64, 133), seed=5)
NUM_BEST = (0, 5, 20, 1, 3)
ROOMY, TIGHT = 3200, 133 + NUM_NEW + 4
TOLERANCE = 1e-4
BOTH = [
    SamplingParams(max_tokens=NUM_NEW, temperature=0.0, num_logprobs=n, prompt_logprobs=n)
    if i % 2
    else SamplingParams(
        max_tokens=NUM_NEW,
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.3,
        logit_bias=((5, 4.0),),
        seed=i,
        num_logprobs=n,
        prompt_logprobs=n,
    )
    for i, n in enumerate(NUM_BEST)
]


class Told(NamedTuple):
    """K tokens' log-probabilities, as the scheduler told them."""

    ids: Tensor  # int64[K, 1 + n]
    values: Tensor  # fp32[K, 1 + n]
    ranks: Tensor  # int64[K]


def told(tables: list[TokenLogprobs], num_best: int) -> Told:
    ids = torch.tensor(array("i", b"".join(table.token_ids for table in tables)), dtype=torch.int64)
    values = torch.tensor(array("f", b"".join(table.logprobs for table in tables)))
    ranks = torch.tensor(array("i", b"".join(table.ranks for table in tables)), dtype=torch.int64)
    return Told(ids.view(-1, 1 + num_best), values.view(-1, 1 + num_best), ranks)


class Listener(Engine):
    """Keeps every delta."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.deltas: dict[tuple[str, int], list[SequenceDelta]] = {}

    def _take(self, delta: SequenceDelta) -> None:
        super()._take(delta)
        self.deltas.setdefault((delta.request_id, delta.sequence_idx), []).append(delta)


@torch.inference_mode()
def check(model: transformers.PreTrainedModel, tokens: list[int], first: int, found: Told) -> float:
    """Compare what was told of tokens[first:]; returns the largest difference."""
    logits = model(torch.tensor([tokens])).logits[0, first - 1 : -1]
    expected = logits.log_softmax(-1)
    assert found.ids[:, 0].tolist() == tokens[first:]
    errors = (found.values - expected.gather(1, found.ids)).abs()
    num_best = found.ids.shape[1] - 1
    best = expected.topk(num_best, dim=-1).values if num_best else expected[:, :0]
    errors = torch.cat((errors, (found.values[:, 1:] - best).abs()), dim=1)
    assert errors.max() < TOLERANCE
    # Ranks: all that is likelier by more than rounding is counted, nothing that is less likely.
    own = expected.gather(1, found.ids[:, :1])
    at_least, at_most = (1 + (expected > own + side).sum(-1) for side in (TOLERANCE, -TOLERANCE))
    assert ((found.ranks >= at_least) & (found.ranks <= at_most)).all()
    return float(errors.max())


def check_all(engine: Listener, model: transformers.PreTrainedModel, ids: list[str]) -> None:
    for request_id, prompt, params in zip(ids, PROMPTS, BOTH, strict=True):
        deltas = engine.deltas[request_id, 0]
        output = engine.outputs[request_id, 0]
        n = params.num_logprobs
        of_output = told([delta.logprobs for delta in deltas if delta.logprobs is not None], n)
        check(model, prompt + output, len(prompt), of_output)
        of_prompt = told([delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None], n)
        if len(prompt) == 1:
            assert len(of_prompt.ranks) == 0
        else:
            check(model, prompt, 1, of_prompt)


@pytest.mark.parametrize(
    ("budget", "page_size", "depth", "cached", "is_tight"),
    [
        (4096, 16, 0, False, False),
        (4096, 16, 1, True, False),
        (16, 1, 2, True, False),
        (7, 1, 1, True, True),
        (16, 4, 2, False, True),
    ],
)
def test_equal_to_transformers(
    checkpoint: Make, budget: int, page_size: int, depth: int, cached: bool, is_tight: bool
) -> None:
    """One batch of rows that ask for different numbers, twice where there is a prefix cache."""
    folder, model = checkpoint("llama")
    num_tokens = TIGHT if is_tight else ROOMY
    engine = Listener(folder, **schedule(budget, page_size, depth, num_tokens=num_tokens, cached=cached))
    for _ in range(1 + cached):
        ids = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, BOTH, strict=True)]
        engine.drain()
        check_all(engine, model, ids)
    if is_tight:
        assert engine.scheduler.stats().num_preemptions > 0


def test_a_cached_prompt(checkpoint: Make) -> None:
    """Without prompt log-probabilities a hit is used, with them it is not; both tell the right values."""
    folder, model = checkpoint("qwen3")
    engine = Listener(folder, enable_prefix_caching=True)
    for params, num_cached in ((BOTH[1], 0), (replace(BOTH[1], prompt_logprobs=-1), 128), (BOTH[1], 0)):
        request_id = engine.add(PROMPTS[4], params)
        engine.drain()
        deltas = engine.deltas[request_id, 0]
        assert sum(delta.num_cached_tokens for delta in deltas) == num_cached
        output = engine.outputs[request_id, 0]
        check(model, PROMPTS[4] + output, 133, told([d.logprobs for d in deltas if d.logprobs is not None], 5))
        of_prompt = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
        assert bool(of_prompt) == (params.prompt_logprobs >= 0)
        if of_prompt:
            check(model, PROMPTS[4], 1, told(of_prompt, 5))


def test_asking_changes_no_token(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama")
    plain = [replace(params, num_logprobs=-1, prompt_logprobs=-1) for params in BOTH]
    mixed = [params if i % 2 else other for i, (params, other) in enumerate(zip(BOTH, plain, strict=True))]
    outputs = [Engine(folder).run(PROMPTS, params) for params in (plain, BOTH, mixed)]
    assert outputs[0] == outputs[1] == outputs[2]


def test_long_prompts_are_scored_in_slices(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits that exist at one time are bounded, whatever the length of the chunk."""
    folder, model = checkpoint("llama")
    monkeypatch.setattr(logprobs, "_LOGITS_BYTES", 10 * VOCAB_SIZE * 4)
    engine = Listener(folder)
    sizes: list[int] = []
    model_logits = engine.runner._model.logits

    def watched(hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return model_logits(hidden)

    monkeypatch.setattr(engine.runner._model, "logits", watched)
    ids = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, BOTH, strict=True)]
    engine.drain()
    check_all(engine, model, ids)
    assert max(sizes) == 10


def test_allowed_token_ids_and_bad_words(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama")
    engine = Listener(folder, pipeline_depth=2)
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    free = engine.run([PROMPTS[2]], greedy)[0][0]
    allowed = (7, 30, 31, 32, 100)
    kept = engine.run([PROMPTS[2], PROMPTS[3]], [replace(greedy, allowed_token_ids=allowed), greedy])
    assert set(kept[0][0]) <= set(allowed)
    assert kept[1][0] == engine.run([PROMPTS[3]], greedy)[0][0]
    # A word of three tokens: its first two still come, its last does not come after them.
    i = 12
    words = (tuple(free[i : i + 3]), (VOCAB_SIZE - 1, free[i + 2]))
    changed = engine.run([PROMPTS[2]], replace(greedy, bad_words=words))[0][0]
    assert changed[: i + 2] == free[: i + 2]
    assert changed[i + 2] != free[i + 2]
    assert tuple(free[i : i + 3]) not in [tuple(changed[j : j + 3]) for j in range(len(changed))]
    # A word of one token never comes; one that begins in the prompt is not a word of the output.
    never = engine.run([PROMPTS[2]], replace(greedy, bad_words=((free[0],), (free[3],))))[0][0]
    assert not {free[0], free[3]} & set(never)
    assert engine.run([PROMPTS[2]], replace(greedy, bad_words=((PROMPTS[2][-1], free[0]),)))[0][0] == free
    # Log-probabilities are the model's own, whatever may be drawn.
    told_of = replace(greedy, allowed_token_ids=allowed, num_logprobs=1)
    request_id = engine.add(PROMPTS[2], told_of)
    engine.drain()
    table = told([d.logprobs for d in engine.deltas[request_id, 0] if d.logprobs is not None], 1)
    assert (table.values[:, 1] >= table.values[:, 0]).all()
    assert not set(table.ids[:, 1].tolist()) <= set(allowed)
