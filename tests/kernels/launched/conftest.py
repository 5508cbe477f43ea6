"""These tests launch the Triton kernels: on a GPU where there is one, else on CPU tensors under Triton's interpreter.

The interpreter's switch must be set before a kernel is defined, so `tests/kernels/test_interpreter.py` runs
this folder in child processes with TRITON_INTERPRET=1. Without the switch and without a GPU nothing is collected.
"""

import os

import pytest
import torch

from tests.kernels.interpreter_limits import dtypes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the present default; unset, newer releases warn

collect_ignore_glob = [] if INTERPRETED or ON_GPU else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_GPU and "kernels/launched" in str(item.path):
            item.add_marker(pytest.mark.gpu)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", dtypes(), ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture
def device() -> str:
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


if INTERPRETED:
    from tests.kernels.fast_interpreter import speed_up_interpreter
    from tests.kernels.launch_forms import start_to_note
    from tests.kernels.ptx import interpret_assembly

    speed_up_interpreter()
    interpret_assembly()
    start_to_note()
