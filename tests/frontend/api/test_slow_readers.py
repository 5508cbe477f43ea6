"""Clients that stop reading: their output is bounded, the engine pauses them, and they lose nothing if they read on."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.engine.generation import MAX_UNREAD_TOKENS
from penstock.ipc.logs import flush_logs
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import closed_for, complete, completion_text, raw_post
from tests.frontend.live_server import LiveServer, live_server

NUM_TOKENS = 60_000
IDS = [5 + i % 300 for i in range(NUM_TOKENS)]


@contextmanager
def serving(checkpoint: Path, sockets: Path, delay: float = 0.001, **frontend: Any) -> Iterator[LiveServer]:
    """With a delay between steps, so that they come one by one on a busy machine too."""
    with live_server(checkpoint, sockets, max_model_len=1_000_000, frontend=frontend) as live:
        live.plays(lambda request, i: Script(IDS, per_step=20, delay=delay) if request.priority else Script(IDS[:4]))
        yield live


def connect(live: LiveServer, **changes: Any) -> socket.socket:
    """A client that asks for much and has little room for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", live.port))
    fields = {"prompt": "x", "priority": 1, "stream": True, "max_tokens": NUM_TOKENS} | changes
    client.sendall(raw_post("/v1/completions", json.dumps(fields).encode()))
    return client


def read_all(client: socket.socket) -> bytes:
    received = bytearray()
    with suppress(ConnectionResetError):
        while not received.endswith(b"\r\n0\r\n\r\n") and (chunk := client.recv(1 << 20)):
            received += chunk
    return bytes(received)


def text_of(answer: bytes) -> str:
    """The text of a chunked stream."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = bytearray()
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    assert body.endswith(b"data: [DONE]\n\n")
    blocks = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block.startswith("data: {")]
    return completion_text([json.loads(block) for block in blocks])


def test_who_reads_on_gets_every_token(checkpoint: Path, sockets: Path) -> None:
    with serving(checkpoint, sockets) as live, closing(connect(live)) as client:
        live.wait_until(lambda: live.scheduler.num_paused == 1, 20)
        [generation] = live.server.service.generations
        num_unread = live.do(lambda: sum(len(delta.token_ids) for _, delta in generation._buffer))
        assert MAX_UNREAD_TOKENS < num_unread < 4 * MAX_UNREAD_TOKENS
        assert complete(live).status == 200, "others notice nothing"
        assert live.do(lambda: live.scheduler.num_paused) == 1
        assert text_of(read_all(client)) == live.tokenizer.decode(IDS)
        assert live.do(lambda: live.scheduler.num_paused) == 0
        assert live.scheduler.aborted == []


def test_who_never_reads_is_closed(checkpoint: Path, sockets: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(checkpoint, sockets, slow_reader_timeout=0.3) as live, closing(connect(live)) as client:
        live.wait_until(lambda: len(live.scheduler.aborted) == 1, 20)
        live.wait_until(lambda: len(live.server.service.generations) == 0)
        live.wait_until(lambda: live.scheduler.num_running == 0)
        received = read_all(client)
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n"), "cut off, not ended"
    flush_logs()
    out, err = capfd.readouterr()
    assert "client_too_slow" in out + err


@pytest.mark.parametrize("stream", [True, False])
def test_who_never_reads_what_is_complete_is_closed(
    checkpoint: Path, sockets: Path, stream: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with live_server(checkpoint, sockets, max_model_len=1_000_000, frontend={"slow_reader_timeout": 0.3}) as live:
        live.plays(lambda request, i: Script(IDS, per_step=NUM_TOKENS))
        with closing(connect(live, stream=stream, return_token_ids=True)):
            deadline = time.monotonic() + 60
            while not closed_for(live, "slow_reader_timeout"):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert live.do(lambda: len(live.server.service.generations)) == 0
    flush_logs()
    out, err = capfd.readouterr()
    assert "client_too_slow" in out + err


def test_a_pause_outlives_the_scheduler(checkpoint: Path, sockets: Path) -> None:
    with serving(checkpoint, sockets) as live, closing(connect(live)) as client:
        live.wait_until(lambda: live.scheduler.num_paused == 1, 20)
        live.do(live.scheduler.forget_peers)
        live.wait_until(lambda: len(live.scheduler.added) == 2)
        assert live.scheduler.added[1].progress
        live.wait_until(lambda: live.scheduler.num_paused == 2)  # under its old id and the new one
        assert text_of(read_all(client)) == live.tokenizer.decode(IDS)


def test_a_whole_answer_is_never_paused(checkpoint: Path, sockets: Path) -> None:
    with serving(checkpoint, sockets, delay=0) as live:
        answer = complete(live, priority=1, max_tokens=NUM_TOKENS)
        assert answer.json()["choices"][0]["text"] == live.tokenizer.decode(IDS)
        assert not [m for m in live.scheduler.received if type(m).__name__ == "PauseRequest"]
