"""The processes meet over tcp:// with the launch's keys, also after the worker has died."""

import socket
from contextlib import closing
from pathlib import Path

import aiohttp

from penstock.ipc.curve import make_key_file
from tests.e2e.conftest import Checkpoint
from tests.e2e.servers import serving, stream


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_stream_over_tcp_outlives_the_worker(checkpoint: Checkpoint, tmp_path: Path) -> None:
    make_key_file(tmp_path / "keys")
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    flags = ("--frontend-address", addresses[0], "--worker-address", addresses[1])
    body = {"prompt": "Hello", "temperature": 0, "max_tokens": 120, "ignore_eos": True, "model": "m"}
    async with (
        serving(
            checkpoint.folder, *flags, "--channel-key-file", tmp_path / "keys", "--served-model-name", "m"
        ) as server,
        aiohttp.ClientSession() as session,
    ):
        url = f"{server.url}/v1/completions"
        undisturbed = "".join([e["choices"][0]["text"] async for e in stream(session, url, body) if e["choices"]])
        pieces: list[str] = []
        async for event in stream(session, url, body):
            pieces.append(event["choices"][0]["text"])
            if len(pieces) == 5:
                server.children()["penstock-worker-0"].kill()
        assert "".join(pieces) == undisturbed
