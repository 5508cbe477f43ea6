"""A schema fuzzer against every operation of a whole server: no answer of 500 or more, none that nobody described.

By default for a budget of seconds; in soak it takes minutes, and follows links between operations. Each run draws other
requests. What failed is kept in `build/fuzz`, and tried again by the next run.
"""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.e2e.servers import serving
from tests.faults.clockwork import make_clockwork
from tests.faults.soak import IS_SOAK
from tests.faults.streams import client
from tests.frontend.parsing.test_tools import TEMPLATE

PHASES, SECONDS = ("examples,coverage,fuzzing,stateful", 900) if IS_SOAK else ("coverage,fuzzing", 10)
KEPT = Path(__file__).parents[3] / "build" / "fuzz"


@pytest.mark.timeout(SECONDS + 500)
async def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    folder = make_clockwork(tmp_path / "m", max_len=512)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)  # with tools and reasoning
    flags = ["--served-model-name", "m", "--num-pages", "512", "--max-request-timeout", "20"]
    flags += ["--chat-template", str(tmp_path / "chat.jinja"), "--data-dir", str(tmp_path / "data")]
    async with serving(folder, *flags) as server, client() as http:
        command = [
            sys.executable,
            "-c",
            "from schemathesis.cli import schemathesis; schemathesis()",
            "run",
            f"{server.url}/openapi.json",
        ]
        command += ["--phases", PHASES, "--mode", "all", "--max-examples", "1000", "--max-time", str(SECONDS)]
        # Who drains or restarts the only engine makes every other answer a 503: those have tests of their own. So have
        # steps, whose stream ends when nobody watches.
        command += ["--exclude-path-regex", r"/engines/\{id\}/|/debug/steps"]
        # What a schema cannot say (a model's name, a context's length) makes good requests bad: not checked.
        command += ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
        # Slow and large examples are wanted here, and NUL is a character like any other.
        command += ["--generation-allow-x00", "true", "--suppress-health-check", "all", "--warnings", "off"]
        command += [
            "--generation-database",
            str(KEPT),
            "--continue-on-failure",
            "--no-color",
            "--request-timeout",
            "30",
        ]
        fuzzer = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        told, _ = await fuzzer.communicate()
        print(told.decode()[-1500:])
        assert fuzzer.returncode == 0
        await server.settled(http, 30)
        assert not [entry for entry in server.log if "exception" in entry], "no traceback"
