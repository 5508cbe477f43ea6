"""What a process does not import when it starts: seconds, and memory, of every start."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "penstock.cli.servers",
        "penstock.core.__main__",
        "penstock.frontend.http.server",
        "penstock.gpu_worker.startup.start",
    ],
)
def test_transformers_is_imported_where_it_is_used_alone(module: str) -> None:
    code = f"import sys, {module}; sys.exit('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
