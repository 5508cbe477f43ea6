"""A client that leaves: its work is aborted at once, wherever it was."""

import asyncio
import json
import socket
import struct
from typing import Any

import pytest

from penstock.frontend.api.service import PromptReader
from tests.frontend.http_client import HELLO, complete, raw_post
from tests.frontend.live_server import LiveServer


def begin(live: LiveServer, path: str, body: dict[str, Any], header: str = "") -> socket.socket:
    """`header` is another line of the head."""
    client = socket.create_connection(("127.0.0.1", live.port))
    client.settimeout(5)
    client.sendall(raw_post(path, json.dumps(body).encode()).replace(b"\r\n", f"\r\n{header}".encode(), 1))
    return client


def leave(client: socket.socket, *, rudely: bool) -> None:
    if rudely:  # a reset instead of a proper end
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def all_aborted(live: LiveServer) -> bool:
    """Each added request has had one abort of all its sequences, and nothing is left anywhere."""
    added = [request.request_id for request in live.scheduler.added]
    aborted = [abort.request_id for abort in live.scheduler.aborted if abort.sequence_idx == -1]
    return sorted(added) == sorted(aborted) and live.scheduler.num_running == 0


@pytest.mark.parametrize("rudely", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_token(live: LiveServer, stream: bool, path: str, rudely: bool) -> None:
    live.gives([], hangs=True)
    client = begin(live, path, {"messages": HELLO, "prompt": ["a", "b"], "n": 2, "stream": stream})
    live.wait_until(lambda: live.scheduler.num_running >= 2)
    leave(client, rudely=rudely)
    live.wait_until(lambda: all_aborted(live))


@pytest.mark.parametrize(
    ("path", "body", "reads"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "render_and_encode"),
        ("/v1/completions", {"prompt": "a"}, "encode_prompts"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, "render_and_encode"),
        ("/v1/responses", {"input": "a"}, "render_and_encode"),
        ("/v1/embeddings", {"input": "a"}, "encode_inputs"),
        ("/api/generate", {"prompt": "a", "raw": True}, "encode_prompts"),
    ],
)
def test_while_its_prompt_is_read(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], reads: str
) -> None:
    """Its place in the queue is free again, and the engine never hears of it."""

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    gate = live.server.service.engine.queue
    monkeypatch.setattr(PromptReader, reads, never)
    client = begin(live, path, body)
    live.wait_until(lambda: gate._num_reserved == 1)
    leave(client, rudely=False)
    live.wait_until(lambda: gate._num_reserved == 0)
    assert live.scheduler.added == []


@pytest.mark.parametrize("rudely", [False, True])
def test_in_the_middle_of_a_stream(live: LiveServer, rudely: bool) -> None:
    live.says("Water runs", hangs=True)
    client = begin(live, "/v1/chat/completions", {"messages": HELLO, "stream": True})
    received = b""
    while b"runs" not in received:
        received += client.recv(65536)
    leave(client, rudely=rudely)
    live.wait_until(lambda: all_aborted(live))


def test_while_tokens_flow(live: LiveServer) -> None:
    live.says("Water runs down the pipe and turns the wheel. " * 20, delay=0.03)
    clients = [begin(live, "/v1/chat/completions", {"messages": HELLO, "stream": i % 2 == 0}) for i in range(50)]
    live.wait_until(lambda: live.scheduler.num_running == 50)
    for index, client in enumerate(clients):
        leave(client, rudely=index % 3 == 0)
    live.wait_until(lambda: all_aborted(live))
    assert live.do(lambda: len(live.server.service.generations)) == 0
    live.reset()
    assert complete(live).status == 200


def test_a_finished_request_is_not_aborted(live: LiveServer) -> None:
    assert complete(live, stream=True).status == 200
    assert complete(live).status == 200
    live.wait_until(lambda: len(live.server.service.generations) == 0)
    assert live.scheduler.aborted == []


def test_a_client_that_leaves_in_its_body(live: LiveServer) -> None:
    client = socket.create_connection(("127.0.0.1", live.port))
    client.sendall(raw_post("/v1/completions", b'{"prompt": "x"}')[:-5])
    client.close()
    assert complete(live).status == 200
    assert len(live.scheduler.added) == 1


def test_an_answer_that_cannot_be_continued_is_not_computed(live: LiveServer) -> None:
    num_kept = len(live.server.service.streams)
    live.gives([], hangs=True)
    client = begin(live, "/v1/chat/completions", {"messages": HELLO}, "x-resumable: true\r\n")
    live.wait_until(lambda: live.scheduler.num_running >= 1)
    leave(client, rudely=False)
    live.wait_until(lambda: all_aborted(live))
    live.wait_until(lambda: len(live.server.service.streams) == num_kept)
