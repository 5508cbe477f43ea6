"""Coding agents for terminals, as published: each is given one task, writes a file with its own tool, and ends.

The requests are kept in the cache folder, and `make test-real` puts them to every published chat template.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.agents.families import QWEN
from tests.agents.scripted_server import scripted_server
from tests.agents.terminal.agents import AGENTS, FILE, KEPT_REQUESTS, TASK, TEXT, TITLE, Agent, environment
from tests.agents.terminal.installed import NotInstallableError, cache, installed
from tests.agents.terminal.recorder import Recorder

pytestmark = pytest.mark.skipif(not os.environ.get("AGENT_TESTS"), reason="they are installed by `make test-agents`")

_SECONDS = 240.0
_MAX_LEN = 1 << 20  # a token for each byte; some begin with 80,000 of them


def rules(agent: Agent, work: Path) -> list[dict[str, object]]:
    return [
        {"after": TASK, "say": TITLE},
        {"after": TASK, "seen": [agent.offers], "say": agent.says.replace("WORK", str(work))},
        {"after": "<tool_response>", "say": agent.then},
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_it_writes_a_file_and_ends(agent: Agent, tmp_path: Path) -> None:
    try:
        program = installed(agent.package)
    except NotInstallableError as error:
        pytest.skip(str(error))
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    model = tmp_path / "model"
    with (
        scripted_server(model, QWEN, script=rules(agent, work), max_len=_MAX_LEN) as target,
        Recorder(target).running() as recorder,
    ):
        done = subprocess.run(
            [program, *agent.command(recorder.url, home)],
            cwd=work,
            env=environment(agent, recorder.url, home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    told = f"{done.stdout}\n{done.stderr}"
    asked = [exchange for exchange in recorder.exchanges if exchange.method == "POST"]
    refused = [(each.path, each.status, each.answer) for each in recorder.exchanges if each.status != 200]
    assert refused == []
    assert (work / FILE).read_text() == TEXT, told
    assert done.returncode == 0, told
    assert agent.prints in told
    assert len(asked) >= agent.num_requests
    kept = cache() / KEPT_REQUESTS / f"{agent.name}.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps([{"path": e.path, "headers": e.headers, "body": e.body} for e in asked]))
