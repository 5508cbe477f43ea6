"""Runs the interpreter tests in a child process: the switch must be set before a kernel is defined."""

from pathlib import Path

import pytest

from tests.kernels.interpreted import passes_and_compiles
from tests.kernels.interpreter_limits import why_not


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(1200)
def test_kernels_under_the_interpreter(tmp_path: Path) -> None:
    """They pass; and what they launch can be compiled."""
    passes_and_compiles(Path(__file__).parent / "launched", tmp_path)
