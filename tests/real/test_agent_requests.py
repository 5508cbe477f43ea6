"""What coding agents asked for when `make test-agents` ran them, put to every published chat template.

With PENSTOCK_AGENT_TABLE=FILE the status of each request on each template is written to that file, as Markdown.
"""

import http.client
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted_server import MODEL
from tests.agents.terminal.agents import KEPT_REQUESTS
from tests.agents.terminal.installed import cache as agents_cache
from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.live_server import LiveServer, live_server
from tests.real.fetched import IS_REAL, NoPackageIndexError, chat_templates, only_real

pytestmark = only_real

Request = dict[str, Any]
_MAX_LEN = 1 << 20


def _sources() -> dict[str, str]:
    try:
        return chat_templates() if IS_REAL else {"none": ""}
    except NoPackageIndexError as error:
        pytest.skip(f"published templates are not tested: {error}", allow_module_level=True)


def _requests() -> dict[str, list[Request]]:
    """The first requests of each agent: a conversation's opening and one with a tool's result are among them."""
    files = sorted((agents_cache() / KEPT_REQUESTS).glob("*.json"))
    return {path.stem: json.loads(path.read_text())[:3] for path in files}


SOURCES = _sources()
REQUESTS = _requests() if IS_REAL else {}


def status(live: LiveServer, request: Request) -> tuple[int, str]:
    """The status of the answer, and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    try:
        connection.request("POST", request["path"], json.dumps(request["body"]), request["headers"])
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@cache
def outcomes(name: str, folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Agent -> what became of each of its requests on this template."""
    write_checkpoint(folder, chat_template=SOURCES[name])
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": "<|endoftext|>"}))
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        live_server(folder, Path(sockets), names=(MODEL,), max_model_len=_MAX_LEN) as live,
    ):
        live.says("The line is written.")
        return {agent: [status(live, request) for request in requests] for agent, requests in REQUESTS.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not REQUESTS:
        pytest.skip("no agent's requests are kept in the cache: run `make test-agents` first")
    return tmp_path_factory.mktemp("templates")


@pytest.mark.parametrize("name", SOURCES)
def test_every_request_is_answered(name: str, folders: Path) -> None:
    found = outcomes(name, folders / name)
    refused = {agent: [each for each in answers if each[0] != 200] for agent, answers in found.items()}
    assert {agent: answers for agent, answers in refused.items() if answers} == {}
    failed = [text[-500:] for answers in found.values() for _, text in answers if '"error":{' in text]
    assert failed == [], "a stream broke after its status was sent"


def test_the_table(folders: Path) -> None:
    """Writes all statuses to a file, if one is named."""
    file = os.environ.get("PENSTOCK_AGENT_TABLE")
    if not file:
        pytest.skip("PENSTOCK_AGENT_TABLE names no file")
    lines = [f"| template | {' | '.join(REQUESTS)} |", f"| --- |{' --- |' * len(REQUESTS)}"]
    for name in SOURCES:
        answers = outcomes(name, folders / name)
        cells = [", ".join(str(code) for code, _ in answers[agent]) for agent in REQUESTS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    Path(file).write_text("\n".join(lines) + "\n")
