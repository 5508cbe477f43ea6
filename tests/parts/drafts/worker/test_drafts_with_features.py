"""Whatever a request asks for, drafts change neither its tokens nor their log-probabilities."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.gpu_worker.state.row_state import RowState
from penstock.ipc.messages import DraftStats, SamplingParams, SequenceDelta
from penstock.parts.drafts.worker.drafter import Drafter
from penstock.parts.drafts.worker.lookup.ngram import NgramDrafter
from penstock.parts.drafts.worker.only_forced import OnlyForced
from tests.gpu_worker.engine_in_process import Engine
from tests.gpu_worker.world import EOS, PROMPT, World
from tests.parts.drafts.drafters import draft_with
from tests.parts.drafts.lengths import draft_always
from tests.parts.drafts.worker.remembered import Remembered
from tests.parts.grammars.worker.random_schemas import random_schema

Make = Callable[[RowState], Drafter]
Requests = Mapping[str, SamplingParams]

N = 2
MAX_TOKENS = 32
LONG_KEYS = {
    "type": "object",
    "properties": {
        "customer_identification": {"type": "integer", "minimum": 0, "maximum": 9999},
        "shipping_address_line": {"type": "string", "maxLength": 12},
        "is_paid_in_advance": {"type": "boolean"},
        "delivery": {"enum": ["standard delivery", "express delivery"]},
    },
    "required": ["customer_identification", "shipping_address_line", "is_paid_in_advance", "delivery"],
    "additionalProperties": False,
}


class Outcome(NamedTuple):
    """Of all requests, by name and sequence."""

    tokens: dict[tuple[str, int], list[int]]
    scores: dict[tuple[str, int], list[Any]]  # for each token, all about log-probabilities, bit for bit
    errors: dict[tuple[str, int], str]
    num_deltas: Counter[tuple[str, int]]
    num_steps: int
    num_guesses: int
    num_right: int


class Noting(Engine):
    """Notes all that comes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.num_deltas = Counter[tuple[str, int]]()
        self.scores: dict[tuple[str, int], list[Any]] = {}
        self.errors: dict[tuple[str, int], str] = {}

    def _take(self, delta: SequenceDelta) -> None:
        key = (delta.request_id, delta.sequence_idx)
        self.num_deltas[key] += bool(delta.token_ids)
        self.outputs[key] += delta.token_ids
        self.errors[key] = delta.error
        for found in (delta.prompt_logprobs, delta.logprobs):
            if found is not None:
                ranks = np.frombuffer(found.ranks, dtype=np.int32)
                columns = [np.frombuffer(part, dtype=np.int32) for part in (found.token_ids, found.logprobs)]
                rows = zip(ranks.tolist(), *(part.reshape(len(ranks), -1).tolist() for part in columns), strict=True)
                self.scores.setdefault(key, []).extend(rows)


def run(
    folder: Path, requests: Requests, make: Make | None = None, k: int = 4, *, num_pages: int = 2000, **options: Any
) -> Outcome:
    """All requests at once, each of N sequences; with drafts, if there is a drafter."""
    sizes = {"max_num_seqs": 16 * N, "max_num_batched_tokens": 4096, "num_pages": num_pages}  # prompts leave some room
    engine = Noting(folder, **sizes, **options)
    names = {engine.add(PROMPT, params, N): name for name, params in requests.items()}
    if make is not None:
        draft_with(engine.runner, make)
        draft_always(engine.scheduler, k)
    num_steps = 0
    while engine.has_work:
        num_steps += 1
        for delta in engine.step().deltas:
            engine._take(delta)
    told = engine.scheduler.stats().drafts or DraftStats("", is_on=False)

    def by_name(found: Mapping[tuple[str, int], Any]) -> dict[tuple[str, int], Any]:
        return {(names[request], i): each for (request, i), each in found.items()}

    found = by_name(engine.outputs), by_name(engine.scores), by_name(engine.errors)
    num_deltas = Counter(by_name(engine.num_deltas))
    return Outcome(*found, num_deltas, num_steps, told.num_guessed, told.num_accepted)


def remembering(*outcomes: Outcome) -> Make:
    """Guesses the outputs of these runs; of the first one as long as a row's tokens begin like one of them."""
    texts = [PROMPT + tokens for outcome in outcomes for tokens in outcome.tokens.values()]
    return partial(Remembered, texts)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("checkpoints") / "bytes")


def limits_on(params: SamplingParams, free: Sequence[int], world: World) -> dict[str, SamplingParams]:
    """One request for each feature, whose limits are where a text without any goes."""
    pairs = tuple((free[i], free[i + 1]) for i in (3, 9, 20))
    late = free[max(free.index(token) for token in free[:24])]
    features: dict[str, dict[str, Any]] = {
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        "logit_bias": {"logit_bias": ((free[2], -4.0), (free[7], 2.5), (free[11], -100.0))},
        "bad_words": {"bad_words": (*pairs, (free[15],), tuple(free[24:29]))},
        "allowed_token_ids": {"allowed_token_ids": tuple(range(3, 259, 2))},
        "min_tokens": {"stop_token_ids": (free[4], free[13]), "min_tokens": 9},
        "stop_token_ids": {"stop_token_ids": (late, EOS)},
        "logprobs": {"num_logprobs": 3},
        "prompt_logprobs": {"prompt_logprobs": 2, "num_logprobs": 0},
        "ignore_eos": {"stop_token_ids": ()},
        "all": {
            "bad_words": pairs, "logit_bias": ((free[7], 1.5),), "frequency_penalty": 0.3, "num_logprobs": 2,
            "stop_token_ids": (free[18],), "min_tokens": 20,
        },
    }  # fmt: skip
    requests = {name: replace(params, **changes) for name, changes in features.items()}
    words = tuple(tuple(world.tokenizer.encode(word, add_special_tokens=False).ids) for word in ("u", "zz", "bad"))
    grammars: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "json": ("json", LONG_KEYS, {"num_logprobs": 2}),
        "regex": ("regex", "(first|second) (up|among) many; [a-z]{3,9}", {"bad_words": words}),
        "choice": ("choice", ["no, never again and again", "not yet, as it seems", "yes, soon"], {"min_tokens": 4}),
        "grammar": ("grammar", 'start: ("<tag>" /[x-z]{1,3}/ "</tag>")~3', {"presence_penalty": 0.5}),
    }
    for name, (kind, grammar, changes) in grammars.items():
        chosen = {"temperature": params.temperature, "seed": params.seed, "max_tokens": 150}
        requests[name] = world.params(kind, grammar, **chosen, **changes)
    return requests


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_feature_gives_what_it_gives_without_drafts(world: World, temperature: float, depth: int) -> None:
    free = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=5)
    without_limits = run(world.folder, {"free": free})
    requests = limits_on(free, without_limits.tokens["free", 0], world)
    expected = run(world.folder, requests, pipeline_depth=depth)
    make = remembering(without_limits, expected)  # so it often guesses what a limit forbids
    found = run(world.folder, requests, make, pipeline_depth=depth)
    for name in requests:
        for i in range(N):
            assert found.tokens[name, i] == expected.tokens[name, i], name
            assert found.scores.get((name, i)) == expected.scores.get((name, i)), name
            assert found.errors[name, i] == expected.errors[name, i], name
        num_found, num_expected = (sum(each.num_deltas[name, i] for i in range(N)) for each in (found, expected))
        assert num_found < num_expected, f"{name}: some guesses are right"


def check(
    world: World, requests: Requests, make: Make, *, fails: Sequence[str] = (), k: int = 16, **options: Any
) -> tuple[float, float]:
    """The outcome is that without drafts. Returns, as parts of those without: its steps, and the sum of all rows'."""
    expected = run(world.folder, requests, **options)
    found = run(world.folder, requests, make, k, **options)
    assert (found.tokens, found.scores, found.errors) == (expected.tokens, expected.scores, expected.errors)
    assert {name for (name, _), error in found.errors.items() if error} == set(fails)
    return found.num_steps / expected.num_steps, found.num_deltas.total() / expected.num_deltas.total()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_schema_with_long_keys_needs_a_third_fewer_steps(world: World, depth: int) -> None:
    requests = {
        f"{temperature}": world.params("json", LONG_KEYS, temperature=temperature, seed=3, num_logprobs=1)
        for temperature in (0.0, 1.0)
    }
    assert check(world, requests, lambda _: OnlyForced(), pipeline_depth=depth)[0] < 0.7
    # With the lengths of a server, which asks for no guesses but where the worker has said that tokens are forced.
    plain = SamplingParams(max_tokens=60, temperature=1.0, seed=4)
    expected = run(world.folder, requests | {"plain": plain}, pipeline_depth=depth)
    found = run(
        world.folder, requests | {"plain": plain}, pipeline_depth=depth, speculative_config='{"method": "grammar"}'
    )
    assert (found.tokens, found.scores, found.errors) == (expected.tokens, expected.scores, expected.errors)
    # Of each row: how many steps there are in all depends on when its grammar is ready.
    assert all(found.num_deltas[key] < 0.7 * expected.num_deltas[key] for key in expected.tokens if key[0] != "plain")
    assert all(found.num_deltas["plain", i] == expected.num_deltas["plain", i] for i in range(N))
    num_written = sum(len(tokens) for (name, _), tokens in found.tokens.items() if name != "plain")
    assert found.num_right == found.num_guesses > num_written / 2


@pytest.mark.parametrize("depth", [0, 2])
def test_texts_under_random_schemas_are_the_same(world: World, depth: int) -> None:
    requests = {
        f"{seed}": world.params("json", random_schema(seed), seed=seed, temperature=seed % 3 / 2, max_tokens=200)
        for seed in range(16)
    }
    assert check(world, requests, lambda _: OnlyForced(), pipeline_depth=depth)[1] < 0.85
    options: dict[str, Any] = {"page_size": 4, "num_pages": 500, "pipeline_depth": depth}
    assert check(world, requests, lambda state: NgramDrafter(state, 1, 4), k=6, **options)[1] < 0.8


def test_where_nothing_can_be_drawn_a_row_fails_as_without_drafts(world: World) -> None:
    requests = {
        "min_tokens": world.params("regex", "abc", min_tokens=9),
        "allowed_token_ids": world.params("regex", "abcdef", allowed_token_ids=(67, 68, 69)),
        "complete": world.params("regex", "abc"),
        "neighbour": world.params("json", LONG_KEYS, seed=1),
    }
    for depth in (0, 1):
        check(world, requests, lambda _: OnlyForced(), fails=("min_tokens", "allowed_token_ids"), pipeline_depth=depth)
