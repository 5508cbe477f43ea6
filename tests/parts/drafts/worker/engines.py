"""Engines with heads, and what they guess."""

import json
from pathlib import Path

from msgspec.structs import replace

from penstock.ipc.messages import SamplingParams
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from penstock.parts.drafts.worker.drafter import Guesses, Int32Array
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.engine_in_process import Engine
from tests.parts.drafts.drafters import drafter_of
from tests.parts.drafts.lengths import drafting_of

NUM_NEW = 16
PROMPTS = prompts((3, 45, 17, 64), seed=1)
SHORT = prompts((9, 20, 17, 24), seed=2)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
SAMPLING = (
    GREEDY,
    SamplingParams(max_tokens=NUM_NEW, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11),
    SamplingParams(max_tokens=NUM_NEW, repetition_penalty=1.2, frequency_penalty=0.3, seed=2**62 + 1),
    SamplingParams(max_tokens=NUM_NEW, temperature=1.3, min_tokens=9, stop_token_ids=tuple(range(3)), seed=7),
)


def with_head(head: Path, count: int = 3, method: str = "eagle") -> dict[str, str]:
    """The option."""
    return {
        "speculative_config": json.dumps(
            {"method": method, "model": str(head), "num_speculative_tokens": count},
        )
    }


def spied(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Let it guess in every step; notes each text that is guessed after, and the guesses."""
    drafting_of(engine.scheduler).lengths = FixedLengths(engine.hello.max_drafts)
    drafter, noted = drafter_of(engine.runner), []
    guess = drafter.guess

    def note(rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        found = guess(rows, positions, most)
        ends = found.counts.cumsum()
        for row, position, count, end in zip(rows, positions, found.counts, ends, strict=True):
            known = engine.runner._state.host_tokens(row)[: position + 1].tolist()
            noted.append((known, found.token_ids[end - count : end].tolist()))
        return found

    drafter.guess = note  # type: ignore[method-assign]
    return noted


def check_exact(plain: Engine, engine: Engine) -> None:
    """Whatever is guessed: the same prompts twice, with prefixes in the cache, then twins with log-probabilities."""
    noted = spied(engine)
    for texts in (SHORT, [[*prompt, 5] for prompt in SHORT]):
        assert engine.run(texts, SAMPLING) == plain.run(texts, SAMPLING)
    with_scores = tuple(replace(params, num_logprobs=2) for params in SAMPLING)
    assert engine.run(SHORT, with_scores, n=2) == plain.run(SHORT, with_scores, n=2)
    assert noted
    assert engine.scheduler.totals.num_preemptions


def check_steps(plain: Engine, engine: Engine, num_drafts: int) -> None:
    """All guesses are right, if there are some in every step."""
    drafting_of(engine.scheduler).lengths = FixedLengths(num_drafts)
    for sampling in (GREEDY, replace(GREEDY, temperature=0.9, seed=5)):
        before = plain.scheduler.totals.num_steps, engine.scheduler.totals.num_steps
        assert engine.run(PROMPTS, sampling) == plain.run(PROMPTS, sampling)
        num_plain, num_steps = (
            each.scheduler.totals.num_steps - its for each, its in zip((plain, engine), before, strict=True)
        )
        assert num_steps <= 1 + -(-num_plain // (1 + num_drafts))
