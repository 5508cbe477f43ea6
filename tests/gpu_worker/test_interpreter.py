"""Runs the tests of the CUDA branches in a child process, with Triton's interpreter on before a kernel is defined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.interpreter_limits import why_not
from tests.kernels.launch_forms import FILE, errors_of, noted

FOLDER = Path(__file__).parent / "launched"


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.timeout(600)
def test_the_engine_under_the_interpreter(tmp_path: Path) -> None:
    """The tests pass; and what they launch, warm-up included, can be compiled."""
    forms = tmp_path / "forms"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", FILE: str(forms)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    errors = errors_of(noted(forms))
    assert not errors, "\n".join(errors)
