"""Runs the interpreter tests in child processes: the switch must be set before a kernel is defined."""

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
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_under_the_interpreter(name: str, tmp_path: Path) -> None:
    """They pass; and what they launch can be compiled."""
    forms = tmp_path / "forms"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", FILE: str(forms)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    errors = errors_of(noted(forms))
    assert not errors, "\n".join(errors)
