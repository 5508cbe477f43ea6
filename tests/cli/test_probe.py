"""`penstock probe` tells a scheduler that answers from one that is only there."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from penstock.core.launch import probe
from penstock.ipc.curve import make_key_file
from tests.e2e.test_tcp import free_port


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_scheduler_that_is_stopped_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    address, workers = f"ipc://{tmp_path}/f", f"ipc://{tmp_path}/w"
    if transport == "tcp":
        make_key_file(tmp_path / "keys")
        monkeypatch.setenv("PENSTOCK_CHANNEL_KEY_FILE", str(tmp_path / "keys"))
        address, workers = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    command = ["scheduler", "--frontend-address", address, "--worker-address", workers]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock.cli", *command)

    async def probed(seconds: str) -> int:
        return await asyncio.to_thread(probe.main, [address, "--seconds", seconds])

    try:
        assert await probed("60") == 0  # it may be asked before it is there
        assert "no worker is connected" in capsys.readouterr().out
        process.send_signal(signal.SIGSTOP)
        assert await probed("1") == 1
        assert "no answer" in capsys.readouterr().err
        if transport == "tcp":  # of which a mere connection does not tell
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 5).close()
        process.send_signal(signal.SIGCONT)
        assert await probed("60") == 0
    finally:
        process.kill()
        await process.wait()


def test_keys_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main(["tcp://127.0.0.1:1", "--channel-key-file", str(tmp_path / "none")]) == 2
    assert "penstock probe:" in capsys.readouterr().err
