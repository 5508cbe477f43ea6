"""Runs the tests of the CUDA branches in a child process, with Triton's interpreter on before a kernel is defined."""

from pathlib import Path

import pytest

from tests.faults.soak import IS_SOAK
from tests.kernels.interpreted import passes_and_compiles
from tests.kernels.interpreter_limits import why_not


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(1200)
def test_the_engine_under_the_interpreter(tmp_path: Path) -> None:
    """The tests pass; and what they launch, warm-up included, can be compiled.

    By default the kernels' own tests show that: they launch the same kernels, in more forms.
    """
    passes_and_compiles(Path(__file__).parent / "launched", tmp_path, compiles=IS_SOAK)
