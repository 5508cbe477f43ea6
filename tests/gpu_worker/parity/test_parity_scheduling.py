"""Tokens do not depend on who goes first: greedy parity under every policy, batching kind, and shape of the schedule.

Any two settings meet by default; the long form is their whole product.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from penstock.ipc.messages import AddRequest, SamplingParams
from penstock.parts.batching.options import BatchingName
from penstock.parts.policies.scheduler.registry import POLICIES
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.schedules import IS_LONG

NUM_NEW = 16
PROMPTS = prompts((1, 45, 17, 64, 99), seed=1)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)
SETTINGS: tuple[tuple[Any, ...], ...] = (
    tuple(name for name in POLICIES if name != "deadline-refuse"),  # as deadline, but not all requests are answered
    get_args(BatchingName),
    (16, 4096),  # tokens of a step
    (0, 1, 2),  # depth of the pipeline
    (False, True),  # prefix cache: all texts run twice
    (False, True),  # a pool so small that sequences are preempted
)


def pairwise(settings: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Few combinations in which any two settings meet: each is the one with most pairs that have not met."""

    def pairs(combination: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
        return {(i, combination[i], j, combination[j]) for i, j in combinations(range(len(settings)), 2)}

    every = list(product(*settings))
    left = set().union(*map(pairs, every))
    while left:
        best = max(every, key=lambda combination: len(pairs(combination) & left))
        left -= pairs(best)
        yield best


CASES = list(product(*SETTINGS)) if IS_LONG else list(pairwise(SETTINGS))


class Targeted(Engine):
    """Its requests differ in all that policies look at."""

    def add_request(self, request: AddRequest) -> Any:
        number = len(self.outputs)
        return super().add_request(
            replace(
                request,
                priority=number % 3,
                tenant=f"{number % 2}",
                ttft_left=(0.0, 30.0, 1e-3)[number % 3],
                tpot=(0.0, 10.0)[number % 2],
            )
        )


@pytest.mark.parametrize(("policy", "batching", "budget", "depth", "cached", "is_tight"), CASES)
def test_greedy(
    checkpoint: Callable[..., Checkpoint],
    policy: str,
    batching: BatchingName,
    budget: int,
    depth: int,
    cached: bool,
    is_tight: bool,
) -> None:
    folder, model = checkpoint("llama")
    num_tokens = 99 + NUM_NEW + 20 if is_tight else 1200
    options: dict[str, Any] = {"scheduling_policy": policy, "batching": batching}
    if batching != "continuous":
        options |= {"max_num_seqs": 4, "batch_wait_ms": 5}
    engine = Targeted(folder, **schedule(budget, 16, depth, num_tokens=num_tokens, cached=cached), **options)
    for _ in range(1 + cached):
        for prompt, outputs in zip(PROMPTS, engine.run(PROMPTS, GREEDY, n=2), strict=True):
            assert outputs[0] == outputs[1]
            assert len(outputs[0]) == NUM_NEW
            assert greedy_errors(model, prompt, outputs[0])[0] == []


def test_any_two_settings_meet() -> None:
    for one, other in combinations(range(len(SETTINGS)), 2):
        assert {(case[one], case[other]) for case in CASES} == set(product(SETTINGS[one], SETTINGS[other]))
