"""Starting, dying and ending: clear refusals, no orphans, the right exit codes."""

import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.checkpoints import make_tokenizer
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import Server, serving, start, stream


def body(max_tokens: int) -> dict[str, Any]:
    return {"model": "m", "prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def texts(
    http: aiohttp.ClientSession, server: Server, max_tokens: int, begun: asyncio.Event | None = None
) -> str:
    """The text of a stream; `begun` is set when the first of it came."""
    text = ""
    async for event in stream(http, f"{server.url}/v1/completions", body(max_tokens)):
        text += event["choices"][0]["text"] if event["choices"] else ""
        if text and begun is not None:
            begun.set()
    return text


async def refusal(*arguments: str) -> tuple[int | None, str]:
    """Run `penstock ARGUMENTS` to its end: exit code and all that it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 90)
    return process.returncode, said.decode()


async def test_a_killed_worker_is_replaced_and_the_stream_goes_on(checkpoint: Checkpoint) -> None:
    flags = ("--served-model-name", "m", "--dtype", "float32")
    async with serving(checkpoint.folder, *flags) as server, aiohttp.ClientSession() as http:
        expected = await texts(http, server, 400)
        begun = asyncio.Event()
        running = asyncio.create_task(texts(http, server, 400, begun))
        await begun.wait()
        assert not running.done()
        position = len(server.log)
        server.children()["penstock-worker-0"].kill()
        await server.logged("worker connected", after=position)
        assert await asyncio.wait_for(running, 60) == expected


async def test_sigterm_lets_streams_finish_and_leaves_no_process(checkpoint: Checkpoint) -> None:
    """Long before it would stop waiting for them."""
    process = await start(checkpoint.folder, "--served-model-name", "m", "--shutdown-timeout", "600")
    server = Server(process)
    server.url = (await server.logged("serving"))["url"]
    children = list(server.children().values())
    async with aiohttp.ClientSession() as http:
        running = asyncio.create_task(texts(http, server, 600))
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert len(await running) > 0
    assert await asyncio.wait_for(server.ended(), 60) == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


async def test_a_second_sigterm_ends_streams_with_a_sentence_and_other_signals_mean_nothing(
    checkpoint: Checkpoint,
) -> None:
    process = await start(checkpoint.folder, "--served-model-name", "m", "--shutdown-timeout", "600")
    server = Server(process)
    server.url = (await server.logged("serving"))["url"]
    for child in (*server.children().values(), psutil.Process(process.pid)):
        if "text" not in child.name():
            child.send_signal(signal.SIGUSR1)
    async with aiohttp.ClientSession() as http:
        url = f"{server.url}/v1/completions"
        async with http.post(url, json=body(2000) | {"stream": True}) as response:
            await response.content.readline()
            process.send_signal(signal.SIGQUIT)
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            said = await asyncio.wait_for(response.content.read(), 60)
    assert b'"error"' in said
    assert await asyncio.wait_for(server.ended(), 60) == 0


async def test_a_hangup_changes_nothing_and_no_orphan_drains(checkpoint: Checkpoint) -> None:
    """SIGHUP without files to read again is a log line; and when the supervisor is killed nobody waits for streams."""
    process = await start(checkpoint.folder, "--served-model-name", "m", "--shutdown-timeout", "600")
    server = Server(process)
    server.url = (await server.logged("serving"))["url"]
    for child in (*server.children().values(), psutil.Process(process.pid)):
        if "text" not in child.name():
            child.send_signal(signal.SIGHUP)
    await server.logged("nothing to reload: no key file, no certificate, no access log", process="penstock-supervisor")
    await server.logged("nothing to reload: no key file, no certificate, no access log", process="penstock-frontend-0")
    children = list(server.children().values())
    assert len(children) >= 3  # and the process that renders templates, perhaps not yet
    async with aiohttp.ClientSession() as http:
        url = f"{server.url}/v1/completions"
        async with http.post(url, json=body(2000) | {"stream": True}) as response:
            await response.content.readline()
            process.kill()
            said = await asyncio.wait_for(response.content.read(), 60)
    assert b'"error"' in said
    assert b"[DONE]" not in said
    await process.wait()
    await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


async def test_a_port_in_use_is_refused_at_once(checkpoint: Checkpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = await refusal("serve", str(checkpoint.folder), "--port", str(port))
    assert code == 2
    assert f"127.0.0.1:{port}" in said
    assert "in use" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("what", ["no config.json", "unknown architecture"])
async def test_a_folder_that_cannot_be_served_is_refused(tmp_path: Path, what: str) -> None:
    if what == "unknown architecture":
        make_tokenizer(tmp_path)
        (tmp_path / "config.json").write_text('{"architectures": ["FancyForCausalLM"], "model_type": "fancy"}')
    code, said = await refusal("serve", str(tmp_path), "--port", "0")
    assert code == 2
    assert ("config.json" if what == "no config.json" else "FancyForCausalLM") in said


async def test_version() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli", "version", stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    assert said.decode().startswith("penstock 0.")
