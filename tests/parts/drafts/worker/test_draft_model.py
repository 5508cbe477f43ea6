"""A draft model guesses: the tokens are those of plain decoding, and a good one is nearly always right."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.config import ConfigError
from penstock.core.steps.drafts import DraftOutcome
from penstock.ipc.messages import SamplingParams, StepResult
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from penstock.parts.drafts.worker.draft_model import drafter as draft_model
from penstock.parts.drafts.worker.draft_model.drafter import DraftModel
from penstock.parts.drafts.worker.draft_model.validity import _digest
from penstock.parts.drafts.worker.guarded import Guarded
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.world import PROMPT, World
from tests.kernels.pairs import every
from tests.parts.drafts.drafters import drafter_of
from tests.parts.drafts.lengths import drafting_of

Make = Callable[..., Checkpoint]
NUM_NEW = 24
PROMPTS = prompts((1, 45, 17, 64), seed=1)
SAMPLING = (
    SamplingParams(max_tokens=NUM_NEW, temperature=0.0),
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11),
    SamplingParams(max_tokens=NUM_NEW, repetition_penalty=1.2, frequency_penalty=0.3, seed=2**62 + 1),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.3, min_tokens=9, stop_token_ids=tuple(range(3)), seed=7),
)
GIB = 2**-8


class Lengths(FixedLengths):
    """The same number for all, and what came of it."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__(num_drafts)
        self.num_guessed = self.num_right = 0

    def note(self, outcome: DraftOutcome) -> None:
        self.num_guessed += sum(outcome.num_guessed)
        self.num_right += sum(max(0, count - 1) for count in outcome.num_tokens)

    def take(self) -> tuple[int, int]:
        found = self.num_guessed, self.num_right
        self.num_guessed = self.num_right = 0
        return found


class Drafting(Engine):
    """With a draft model."""

    def __init__(self, folder: Path, draft: Path, num_drafts: int = 3, *, of_draft: Any = (), **options: Any) -> None:
        speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_drafts}
        super().__init__(folder, speculative_config=json.dumps(speculative | dict(of_draft)), **options)
        self.lengths = drafting_of(self.scheduler).lengths = Lengths(num_drafts)

    @property
    def drafter(self) -> DraftModel:
        guarded = drafter_of(self.runner)
        assert isinstance(guarded, Guarded)
        assert isinstance(guarded._drafter, DraftModel), "it has not been switched off"
        return guarded._drafter


@pytest.mark.parametrize(
    ("name", "kernels", "depth", "cached", "kind", "num_drafts"),
    every(
        ("llama", "qwen3-layer-types", "llama-dynamic"),
        ("native", "torch"),
        (0, 1, 2),
        (False, True),
        ("recompute", "swap"),
        (1, 4),
    ),
)
def test_tokens_are_those_of_the_plain_run(
    checkpoint: Make, name: str, kernels: str, depth: int, cached: bool, kind: str, num_drafts: int
) -> None:
    """Small chunks, forks, and few pages: rows are preempted, and enter again; then all of it once more."""
    folder, _ = checkpoint(name)
    draft, _ = checkpoint("mistral-window", num_hidden_layers=1)
    num_tokens = 300 if name == "qwen3-layer-types" else 150
    options = schedule(32, 4, depth, num_tokens=num_tokens, cached=cached) | {"cpu_kernels": kernels}
    expected = Engine(folder, **options | {"num_pages": 800}).run(PROMPTS, SAMPLING, n=2)
    tier = {"host_kv_gib": GIB} if kind == "swap" else {}
    engine = Drafting(folder, draft, num_drafts, **options, preemption=kind, **tier)
    for _ in range(2):
        assert engine.run(PROMPTS, SAMPLING, n=2) == expected
        assert engine.lengths.take()[0] > 20
    assert engine.scheduler.totals.num_preemptions > 0


@pytest.mark.parametrize(("kernels", "depth"), [("native", 0), ("native", 1), ("torch", 2)])
def test_the_model_as_its_own_draft_is_nearly_always_right(checkpoint: Make, kernels: str, depth: int) -> None:
    """Rows that sample, too: both draw with the same noise. Pages of the prefix cache hold its keys and values."""
    folder, _ = checkpoint("llama")
    options = schedule(4096, 16, depth, num_tokens=3200, cached=True) | {"cpu_kernels": kernels}
    expected = Engine(folder, **options).run(PROMPTS, SAMPLING)
    engine = Drafting(folder, folder, **options)
    for _ in range(2):
        assert engine.run(PROMPTS, SAMPLING) == expected
        guessed, right = engine.lengths.take()
        assert guessed > 60
        # A sequence ends at a token that stops it, whatever follows.
        assert right >= 0.95 * guessed


def test_a_preempted_sequence_s_pages_are_valid_or_computed_again(checkpoint: Make) -> None:
    """Its own draft is nearly always right, though the pages that come back have another's keys and values."""
    folder, _ = checkpoint("llama")
    options = schedule(64, 4, 0, num_tokens=170, cached=True)
    sampling = replace(SAMPLING[0], max_tokens=40)
    expected = Engine(folder, **options).run(PROMPTS, sampling)
    engine = Drafting(folder, folder, **options, preemption="swap", host_kv_gib=GIB)
    assert engine.run(PROMPTS, sampling) == expected
    assert engine.scheduler.totals.num_preemptions > 0
    guessed, right = engine.lengths.take()
    assert guessed > 60
    assert right >= 0.95 * guessed


def computed_tokens(drafter: DraftModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each of its passes from now on."""
    passes, counts = drafter._passes, list[int]()
    compute = passes.compute

    def noted(rows: Any, start: Any, num_new: Any, samples: Any) -> torch.Tensor:
        counts.append(int(num_new.sum()))
        return compute(rows, start, num_new, samples)

    monkeypatch.setattr(passes, "compute", noted)
    return counts


def test_what_is_missing_is_caught_up_step_by_step(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in the cache without its keys and values: a few tokens a step, and no guesses before the end of it."""
    monkeypatch.setattr(draft_model, "_CATCH_UP", 10)
    folder, _ = checkpoint("llama")
    engine = Drafting(folder, folder, **schedule(512, 4, 0, num_tokens=2000, cached=True))
    [prompt] = prompts((81,), seed=5)
    sampling = replace(SAMPLING[0], max_tokens=30)
    first = engine.run([prompt], sampling)
    guessed, _ = engine.lengths.take()
    engine.drafter.clear()  # as if the pages had come from another engine
    counts = computed_tokens(engine.drafter, monkeypatch)
    assert engine.run([prompt], sampling) == first
    assert max(counts) <= 11 + 1
    assert sum(counts) >= 80
    behind, right = engine.lengths.take()
    assert 0 < behind < guessed
    assert right >= 0.95 * behind
    counts.clear()
    engine.run([prompt], sampling)
    assert engine.lengths.take()[0] == guessed
    assert sum(counts) < 60, "the prompt is there"


def test_prompts_are_left_alone_while_nothing_is_guessed(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "_UNASKED", 5)
    folder, _ = checkpoint("llama")
    engine = Drafting(folder, folder, **schedule(512, 4, 0, num_tokens=2000))
    counts = computed_tokens(engine.drafter, monkeypatch)
    engine.run(PROMPTS, replace(SAMPLING[0], max_drafts=0))
    assert not counts, "nobody wants guesses"
    engine.lengths._num_drafts = 0
    engine.run(PROMPTS[1:2], SAMPLING[0])
    engine.run(PROMPTS[1:2], SAMPLING[0])
    assert not counts, "nothing has been guessed for a while"
    engine.lengths._num_drafts = 3
    engine.run(PROMPTS[1:2], SAMPLING[0])
    assert engine.lengths.take()[0] > 10


def test_beyond_the_draft_s_length_nothing_is_guessed(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama")
    options = schedule(512, 4, 0, num_tokens=2000)
    sampling = replace(SAMPLING[0], max_tokens=60)
    expected = Engine(folder, **options).run(PROMPTS, sampling)
    short, _ = checkpoint("llama", max_position_embeddings=50)
    for draft, of_draft in ((short, {}), (folder, {"max_model_len": 50})):
        engine = Drafting(folder, draft, of_draft=of_draft, **options)
        assert engine.run(PROMPTS, sampling) == expected
        guessed, _ = engine.lengths.take()
        assert 0 < guessed <= 4 * 50, "45 + 60 tokens, and the others"


@pytest.mark.parametrize("vocab_size", [150, 230])
def test_vocabularies_of_other_sizes(checkpoint: Make, vocab_size: int) -> None:
    """Numbers that only one of the two has are never looked up, or guessed."""
    folder, _ = checkpoint("llama")
    draft, _ = checkpoint("llama", vocab_size=vocab_size)
    options = schedule(512, 4, 0, num_tokens=2000, cached=True)
    expected = Engine(folder, **options).run(PROMPTS, SAMPLING)
    engine = Drafting(folder, draft, **options)
    assert engine.run(PROMPTS, SAMPLING) == expected
    assert engine.drafter is not None
    if vocab_size > 199:
        assert engine.lengths.take()[0] > 60


def test_memory_is_planned_for_both(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama")
    options: dict[str, Any] = {"num_pages": 0, "cpu_kv_cache_gib": 2**-7}
    alone = Engine(folder, **options).hello
    drafting = Drafting(folder, folder, **options)
    hello = drafting.hello
    assert hello.page_bytes == alone.page_bytes == hello.draft_page_bytes > 0
    assert alone.draft_page_bytes == 0
    assert hello.num_pages == 2**23 // (2 * hello.page_bytes) == alone.num_pages // 2
    assert drafting.scheduler.accounts.page_bytes == 2 * hello.page_bytes


def test_a_failing_step_switches_it_off(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint("llama")
    options = schedule(64, 4, 1, num_tokens=2000)
    expected = Engine(folder, **options).run(PROMPTS, SAMPLING)
    engine = Drafting(folder, folder, **options)
    passes = engine.drafter._passes
    compute, num_left = passes.compute, iter(range(9))

    def failing(*batch: Any) -> torch.Tensor:
        if next(num_left, None) is None:
            raise RuntimeError("no more passes")
        return compute(*batch)

    monkeypatch.setattr(passes, "compute", failing)
    process, errors = engine.scheduler.process, list[str]()

    def noted(result: StepResult, *more: Any) -> Any:
        errors.append(result.drafter_error)
        return process(result, *more)

    monkeypatch.setattr(engine.scheduler, "process", noted)
    assert engine.run(PROMPTS, SAMPLING) == expected
    assert [error for error in errors if error] == ["RuntimeError: no more passes"]
    guarded = drafter_of(engine.runner)
    assert isinstance(guarded, Guarded)
    assert guarded._drafter is None
    assert engine.run(PROMPTS, SAMPLING) == expected
    assert engine.lengths.take()[0] > 0


def test_what_cannot_be_a_draft_model(checkpoint: Make, tmp_path: Path) -> None:
    folder, _ = checkpoint("llama")
    with pytest.raises(ConfigError, match="no checkpoint folder at"):
        Drafting(folder, tmp_path / "nothing")
    with pytest.raises(ConfigError, match="max_model_len 600 exceeds its 512 positions"):
        Drafting(folder, folder, of_draft={"max_model_len": 600})
    with pytest.raises(ConfigError, match="of these can be made"):
        Drafting(folder, folder, of_draft={"quantization": "nonsense"})


def test_a_quantized_draft_model(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama", hidden_size=128, intermediate_size=256, dtype="bfloat16")
    expected = Engine(folder).run(PROMPTS, SAMPLING)
    engine = Drafting(folder, folder, of_draft={"quantization": "fp8"})
    assert engine.run(PROMPTS, SAMPLING) == expected
    guessed, right = engine.lengths.take()
    assert 0 < right < guessed


def test_names_of_pages_depend_on_all_tokens_before(checkpoint: Make) -> None:
    """Two prompts whose second pages hold the same tokens; pages that others have had."""
    folder, _ = checkpoint("llama")
    options = schedule(512, 16, 0, num_tokens=128, cached=True)
    same = list(range(50, 66))
    texts = [[*range(10, 26), *same, 7], [*range(20, 36), *same, 7]]
    engine = Drafting(folder, folder, **options)
    for text in texts * 2:
        engine.run([text], SAMPLING[0])
        guessed, right = engine.lengths.take()
        assert right >= 0.95 * guessed > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_with_a_grammar(tmp_path: Path, depth: int) -> None:
    """What a grammar forces comes first: the draft model guesses what follows, and computes what was forced."""
    world = World(tmp_path / "world")
    names = [f"customer_identification_{i}" for i in range(3)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 12} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    sampling = [
        world.params("json", schema, max_tokens=200, temperature=0.0),
        world.params("json", schema, max_tokens=200, temperature=0.8, seed=4),
        SamplingParams(max_tokens=60, temperature=0.7, seed=9),
    ]
    texts = [PROMPT] * len(sampling)
    options = schedule(512, 4, depth, num_tokens=3000, cached=True)
    plain = Engine(world.folder, **options)
    expected = plain.run(texts, sampling)
    engine = Drafting(world.folder, world.folder, 4, **options)
    assert engine.run(texts, sampling) == expected
    assert engine.drafter.traits.guesses_ahead
    assert engine.scheduler.totals.num_steps < 0.6 * plain.scheduler.totals.num_steps
    known = set[bytes]()
    for text in ([*PROMPT, *output] for (output,) in expected):
        digest = b"\0"
        for begin in range(0, len(text) - 3, 4):
            digest = _digest(digest, np.array(text[begin : begin + 4], dtype=np.int32).tobytes())
            known.add(digest)
    pages = {name for name in engine.drafter._kv._names if name}
    assert len(pages) > 20
    assert pages <= known, "forced tokens have come true"
