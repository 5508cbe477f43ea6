"""A folder of tests under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.launch_forms import FILE, errors_of, noted


def passes_and_compiles(folder: Path, scratch: Path, *, compiles: bool = True) -> None:
    """The folder's tests pass in a child process with the switch on; what they launch can be compiled, if wanted."""
    forms = scratch / "forms"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", FILE: str(forms)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    errors = errors_of(noted(forms)) if compiles else []
    assert not errors, "\n".join(errors)
