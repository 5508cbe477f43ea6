"""Every family with every option: greedy tokens and their log-probabilities are transformers', in every schedule."""

from collections.abc import Callable
from itertools import combinations

import pytest
import transformers

from penstock.models.families.registry import ARCHITECTURES
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import check
from tests.gpu_worker.families.schedules import ALL, IS_LONG, PAIRWISE, schedules
from tests.gpu_worker.families.table import CASES

Find = Callable[[str], Reference]

BACKENDS = {
    "torch": {"model_impl": "own", "cpu_kernels": "torch"},
    "native": {"model_impl": "own", "cpu_kernels": "native"},
    "transformers": {"model_impl": "transformers"},
}


def is_ours(name: str) -> bool:
    """Whether we have code for the case's architecture."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return names[CASES[name].model_type] in ARCHITECTURES


def backends(name: str) -> list[str]:
    """Our own code on each kind of kernels; transformers' code if we have none, and in the long form."""
    ours = is_ours(name)
    theirs = CASES[name].by_transformers and (IS_LONG or not ours)
    return ["torch", "native"] * ours + ["transformers"] * theirs


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Makes a case's checkpoint; the last one is kept, since tests of a case follow one another."""
    made: dict[str, Reference] = {}

    def find(name: str) -> Reference:
        if name not in made:
            made.clear()
            made[name] = Reference(tmp_path_factory.mktemp(name), CASES[name])
        return made[name]

    return find


@pytest.mark.timeout(900 if IS_LONG else 300)
@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name in CASES for backend in backends(name)])
def test_greedy(find: Find, name: str, backend: str) -> None:
    runs = schedules(list(CASES).index(name) + list(BACKENDS).index(backend))
    if not IS_LONG:
        runs = runs[:1]  # the description meets another one on the other kernels
    for run in PAIRWISE if len(runs) > len(PAIRWISE) and backend == "transformers" else runs:
        check(find(name), run, **BACKENDS[backend])


def test_all_settings_of_schedules_meet_in_pairs() -> None:
    for one, other in combinations(range(len(PAIRWISE[0])), 2):
        assert {(run[one], run[other]) for run in PAIRWISE} == {(run[one], run[other]) for run in ALL}
