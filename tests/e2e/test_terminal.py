"""`penstock serve` as a person sees it: on a terminal, and when it cannot start."""

import asyncio
import contextlib
import json
import os
import pty
import shutil
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.e2e.conftest import Checkpoint

_CTRL_C = b"\x03"


class Terminal:
    """A command on a pseudo-terminal of its own, and all that it has written there."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.text = ""
        self._descriptor = descriptor

    async def read_until(self, words: str, seconds: float = 90.0) -> None:
        """Read until the text holds `words`, or fail."""
        async with asyncio.timeout(seconds):
            while words not in self.text:
                assert await self._read(), f"it ended: {self.text}"

    async def end(self) -> int:
        """Read to the end; the exit code."""
        async with asyncio.timeout(60):
            while await self._read():
                pass
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def press(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    async def _read(self) -> bool:
        try:
            piece = await asyncio.to_thread(os.read, self._descriptor, 65536)
        except OSError:  # the last process has closed its side
            return False
        self.text += piece.decode(errors="replace")
        return bool(piece)


def on_terminal(*arguments: str) -> Terminal:
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "200", "PENSTOCK_SPARE_WORKER": "false"}
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, environment)
    return Terminal(pid, descriptor)


async def test_a_terminal_shows_what_was_found_and_ctrl_c_ends_it(checkpoint: Checkpoint) -> None:
    slow = ("--num-threads", "1", "--cpu-kernels", "torch")
    terminal = on_terminal("serve", str(checkpoint.folder), "--port", "0", *slow)
    try:
        await terminal.read_until("--log-level info")
        children = psutil.Process(terminal.pid).children(recursive=True)
        terminal.press(_CTRL_C)
        assert await terminal.end() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(terminal.pid, 9)
    for words in ("LlamaForCausalLM", "parameters", str(checkpoint.folder), "cpu", "KV pool", "chats of 1k", "curl -N"):
        assert words in terminal.text
    assert "running streams may finish" in terminal.text
    for level in ("[info", "[warning"):
        assert level not in terminal.text  # the processes' own lines would run through it
    assert terminal.text.count("torch's kernels compute on this CPU") == 1
    assert "--cpu-kernels" in terminal.text
    assert "error" not in terminal.text
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


async def test_a_second_ctrl_c_does_not_wait_for_streams(checkpoint: Checkpoint) -> None:
    alone = ("--num-threads", "1", "--max-num-seqs", "1")
    terminal = on_terminal("serve", str(checkpoint.folder), "--port", "0", *alone)
    try:
        await terminal.read_until("--log-level info")
        url = terminal.text.split("curl -N ")[1].split()[0].replace("chat/completions", "completions")
        prompts = [[5, 6, 7]] * 16  # one after the other: enough to write for a fast machine
        body = {"prompt": prompts, "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            await response.content.readline()
            terminal.press(_CTRL_C)
            await terminal.read_until("running streams may finish")
            await asyncio.sleep(0.2)
            terminal.press(_CTRL_C)
            with contextlib.suppress(aiohttp.ClientError):
                assert not (await response.content.read()).endswith(b"[DONE]\n\n")
        assert await terminal.end() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(terminal.pid, 9)


async def test_weights_that_do_not_fit_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for path in checkpoint.folder.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"hidden_size": 1 << 16, "intermediate_size": 1 << 30}  # a matrix beyond any address space
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, lines = await refused(tmp_path, "--load-format", "dummy")
    assert code == 2
    assert len(lines) == 1, lines
    assert "out of memory: the weights" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step-trace", "/dev/full"), "No space left on device"),
        (("--runtime-dir", "/dev/null/run"), "Not a directory"),
        (("--cpu-kv-cache-gib", "1000000"), "out of memory"),
    ],
    ids=["full disk", "no folder for sockets", "pool too large"],
)
async def test_what_cannot_start_is_said_in_one_sentence(
    checkpoint: Checkpoint, arguments: tuple[str, ...], words: str
) -> None:
    code, lines = await refused(checkpoint.folder, *arguments)
    assert code == 2
    assert len(lines) == 1, lines
    assert words in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cpu-kv-cache-gib", "1e-8"), "penstock: "),  # no KV page, found by the worker
        (("--chat-template", "/nowhere"), "penstock: "),  # by the frontend
    ],
    ids=["worker", "frontend"],
)
async def test_a_terminal_shows_a_sentence_and_no_log_line(
    checkpoint: Checkpoint, arguments: tuple[str, ...], words: str
) -> None:
    terminal = on_terminal("serve", str(checkpoint.folder), "--port", "0", "--num-threads", "1", *arguments)
    assert await terminal.end() == 2
    said = [line for line in terminal.text.splitlines() if line.startswith(words)]
    assert len(said) == 1, terminal.text
    for words in ("[error", "reason=", "process=", "Traceback", "locals"):
        assert words not in terminal.text


async def refused(folder: Path, *arguments: str) -> tuple[int | None, list[str]]:
    """Start a server that should end by itself: its exit code, and what it said from warnings on."""
    command = [sys.executable, "-m", "penstock.cli", "serve", str(folder), "--port", "0", *arguments]
    process = await asyncio.create_subprocess_exec(*command, "--log-level", "warning", stderr=asyncio.subprocess.PIPE)
    try:
        _, said = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:  # it serves
            process.terminate()
    return process.returncode, said.decode().splitlines()
