"""A checkpoint of a form that only this test knows is served like the folder that it was made from."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.models.check import check_checkpoint
from penstock.models.files.source import eos_token_ids, fingerprint
from penstock.models.finding.registry import FORMS, open_checkpoint
from tests.e2e.conftest import Checkpoint
from tests.e2e.one_file import OneFile, write_one_file
from tests.e2e.servers import serving

MESSAGES = [{"role": "user", "content": "Hello there"}]
# Every Python process of the server starts with this, helpers as well: they all open the checkpoint by its path.
REGISTERS_THE_FORM = """
from penstock.models.finding.registry import FORMS
from tests.e2e.one_file import OneFile
FORMS.append(OneFile.at)
"""
QUESTIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The gate", "max_tokens": 24, "temperature": 0, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24, "seed": 3, "logprobs": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "seed": 4, "structured_outputs": {"regex": "[a-z]{8,12}"}}),
    ("/tokenize", {"messages": MESSAGES}),
]


@pytest.fixture
def one_file(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("penstock.models.finding.registry.FORMS", [*FORMS, OneFile.at])
    return write_one_file(open_checkpoint(checkpoint.folder), tmp_path)


async def answers(model: Path, **environment: str) -> list[dict[str, Any]]:
    """What a server of the model says to each question, but for ids and times."""
    found = []
    async with (
        serving(model, "--served-model-name", "m", "--dtype", "float32", **environment) as server,
        aiohttp.ClientSession() as http,
    ):
        for path, body in QUESTIONS:
            async with http.post(server.url + path, json=body | {"model": "m"}) as response:
                answer = await response.json()
                assert response.status == 200, answer
                found.append({name: answer[name] for name in answer if name not in ("id", "created")})
    return found


def test_what_is_known_without_a_process(checkpoint: Checkpoint, one_file: Path) -> None:
    folder, other = open_checkpoint(checkpoint.folder), open_checkpoint(one_file)
    check_checkpoint(other)
    assert isinstance(other, OneFile)
    assert fingerprint(other) == fingerprint(folder)
    assert eos_token_ids(other) == eos_token_ids(folder)


async def test_it_is_served_with_the_same_tokens(checkpoint: Checkpoint, one_file: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REGISTERS_THE_FORM)
    paths = f"{tmp_path}:{Path(__file__).parents[2]}"
    assert await answers(one_file, PYTHONPATH=paths) == await answers(checkpoint.folder)
