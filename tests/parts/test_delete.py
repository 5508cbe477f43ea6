"""Without a part's folder all else works: a chat request is answered, and the help loses the part's options alone."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import aiohttp
import pytest

from penstock.config.flags import flags_of
from penstock.config.part_options import part_options
from penstock.parts import NAMES
from tests.e2e.servers import serving
from tests.faults.soak import IS_SOAK

_ANTHROPIC = {"anthropic-version": "2023-06-01"}
HIDING = Path(__file__).parent / "hiding"


def without(*names: str) -> dict[str, str]:
    """The environment in which these parts are not there."""
    path = os.pathsep.join([str(HIDING), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "PENSTOCK_TEST_HIDDEN": " ".join(names)}


@cache
def options_in_help(*hidden: str) -> set[str]:
    command = [sys.executable, "-m", "penstock.cli", "serve", "--help-all"]
    environment = os.environ | without(*hidden) | {"COLUMNS": "100"}
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {name.replace("[no-]", "") for name in re.findall(r"^  (--[][a-z-]+)", told, re.MULTILINE)}


@pytest.mark.parametrize("name", part_options())
def test_the_help_loses_its_options_and_no_others(name: str) -> None:
    assert options_in_help() - options_in_help(name) == {flag.name for flag in flags_of(name)}
    assert options_in_help(name) < options_in_help()


async def answers_without(*names: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    async with serving(**without(*names)) as server, aiohttp.ClientSession() as session:
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["usage"]["completion_tokens"] > 0
        await server.settled(session)


async def test_a_chat_request_is_answered_without_any_part() -> None:
    await answers_without(*NAMES)


async def test_without_dialects_nothing_is_at_their_paths() -> None:
    """And what is at paths that they share is the spine's, whatever headers a request has."""
    hidden = without("responses", "anthropic", "ollama", "batches")
    async with serving(**hidden) as server, aiohttp.ClientSession() as session:
        for path in ("/v1/responses", "/v1/messages", "/api/chat", "/v1/batches", "/v1/files", "/v1/conversations"):
            async with session.post(f"{server.url}{path}", json={}, headers=_ANTHROPIC) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found"), path
        async with session.get(f"{server.url}/v1/models", headers=_ANTHROPIC) as answer:
            assert (await answer.json())["object"] == "list"
        async with session.get(f"{server.url}/openapi.json") as answer:
            assert "/v1/chat/completions" in (paths := (await answer.json())["paths"])
            assert not [path for path in paths if path.startswith(("/v1/responses", "/api/", "/v1/batches"))]
        async with session.post(f"{server.url}/v1/embeddings", json={"input": "Hello"}) as answer:
            assert answer.status == 200, await answer.text()
        await server.settled(session)


@pytest.mark.skipif(not IS_SOAK, reason="a server for each part: PENSTOCK_SOAK=1")
@pytest.mark.parametrize("name", NAMES)
async def test_a_chat_request_is_answered_without_it(name: str) -> None:
    await answers_without(name)
