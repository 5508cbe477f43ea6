"""A schema fuzzer against every operation: no answer of 500 or more, none that /openapi.json does not describe.

PENSTOCK_FULL_FUZZ=1 makes hundreds of requests of each kind, and follows links between operations; it takes minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.live_server import live_server
from tests.frontend.test_tools import TEMPLATE

IS_FULL = bool(os.environ.get("PENSTOCK_FULL_FUZZ"))
PHASES, NUM_EXAMPLES = ("coverage,fuzzing,stateful", 300) if IS_FULL else ("coverage,fuzzing", 3)


@pytest.mark.timeout(1200 if IS_FULL else 180)
def test_no_request_breaks_the_server(tmp_path: Path, sockets: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", chat_template=TEMPLATE)
    with live_server(folder, sockets) as live:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{live.url}/openapi.json"]
        command += ["--phases", PHASES, "--mode", "all", "--max-examples", str(NUM_EXAMPLES)]
        # What a schema cannot say (a model's name, a context's length) makes good requests bad: not checked.
        command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
        command += ["--generation-allow-x00", "true", "--suppress-health-check", "all", "--warnings", "off"]
        command += ["--no-shrink", "--continue-on-failure", "--no-color", "--seed", "1", "--request-timeout", "30"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        live.wait_until(lambda: live.server.service.num_generating == 0)
