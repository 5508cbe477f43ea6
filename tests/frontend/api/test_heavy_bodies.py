"""Nobody's body keeps others waiting: the longest silence of a frontend's event loop while heavy ones come.

The whole family is some thousand bodies at `--max-body-bytes`; `PENSTOCK_SOAK=1` sends them all, and writes a table of
the worst ones to the file that `PENSTOCK_HEAVY_TABLE` names.
"""

import http.client
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.soak import IS_SOAK
from tests.frontend.api.heavy_bodies import HeavyBody, heavy_bodies
from tests.frontend.checkpoint_folder import CHATML, write_checkpoint
from tests.frontend.http_client import post
from tests.frontend.probed_server import ProbedServer, probed_server

MAX_BODY_BYTES = 8 << 20

MAX_SILENCE = 0.25
"""Seconds. The aim is 0.05; machines differ, and may be busy."""

TEMPLATE = CHATML + "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"

_WORST = (
    "unknown field of a message: empty lists",
    "arguments of a call, as text: empty lists",
    "strict tool: empty lists",
    "forced tool: empty objects",
    "schema: members",
    "prompt: ids",
    "prompt: lists of ids",
    "many prompts, many answers: words",
    "unknown field of an item: empty lists",
    "content: parts",
    "messages: messages",
    "tools: tools",
    "stop: empty strings",
    "logit_bias: members",
    "metadata: members",
    "tokens: ids",
    "grammar: quotes",
    "content: backslashes",
    "content: wide characters",
)


def _chosen() -> list[HeavyBody]:
    everything = list(heavy_bodies())
    if IS_SOAK:
        return everything
    worst = [body for body in everything if body.name in _WORST]
    return worst + random.Random(0).sample(everything, 40)


@contextmanager
def _honest_clients(server: ProbedServer) -> Iterator[dict[str, float]]:
    """One that streams and one that asks for /health, again and again; the longest that they waited since last read."""
    longest = {"stream": 0.0, "health": 0.0}
    stop = threading.Event()

    def ask_health() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        while not stop.is_set():
            begun = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            longest["health"] = max(longest["health"], time.monotonic() - begun)
            time.sleep(0.005)
        connection.close()

    def stream() -> None:
        body = '{"prompt": "Hello", "stream": true, "max_tokens": 20}'
        while not stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer, heard = connection.getresponse(), time.monotonic()
            while answer.readline():
                now = time.monotonic()
                longest["stream"] = max(longest["stream"], now - heard)
                heard = now
            connection.close()

    threads = [threading.Thread(target=ask_health), threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    try:
        yield longest
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _send(server: ProbedServer, body: bytes, route: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", route, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    except TimeoutError:
        return "none in a minute"
    except ConnectionError:  # refused while it was still being sent
        return "closed"
    finally:
        connection.close()


@pytest.mark.long
def test_no_body_silences_a_frontend(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", chat_template=TEMPLATE)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        probed_server(folder, Path(sockets), max_body_bytes=MAX_BODY_BYTES) as server,
        _honest_clients(server) as longest,
    ):
        assert post(server, "/v1/completions", {"prompt": "Hello", "max_tokens": 1}).status == 200
        for body in _chosen():
            content = body.make(MAX_BODY_BYTES)
            time.sleep(0.02)
            server.silence()
            longest.update(stream=0.0, health=0.0)
            begun = time.monotonic()
            status = _send(server, content, body.route)
            seconds = time.monotonic() - begun
            time.sleep(0.02)
            silence = server.silence()
            rows.append((silence.own, silence.seen, longest["stream"], longest["health"], seconds, status, str(body)))
    rows.sort(reverse=True)
    _write_table(rows)
    assert not [row[-1] for row in rows if row[5] in ("500", "503", "none in a minute")]
    late = [f"{row[0]:.2f} s: {row[-1]}" for row in rows if row[0] > MAX_SILENCE]
    assert not late, "\n".join(late)


@pytest.mark.long
def test_no_conversation_silences_a_frontend(tmp_path: Path) -> None:
    """A chain of stored responses, each as heavy as it may be; then a few bytes that go on from it."""
    folder = write_checkpoint(tmp_path / "model", chat_template=TEMPLATE)
    parts = [{"type": "summary_text", "text": "x" * 400}] * 3000  # what the template does not show
    items: list[Any] = [{"type": "reasoning", "summary": parts, "content": []}, {"role": "user", "content": "x"}]
    items[1]["unknown"] = [[]] * 10_000
    statuses, silences = [], []
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        probed_server(folder, Path(sockets), max_body_bytes=MAX_BODY_BYTES) as server,
    ):
        last: dict[str, str] = {}
        for given in [*[items] * 7, *["again"] * 4]:
            server.silence()
            answer = post(server, "/v1/responses", {"input": given, "max_output_tokens": 1, **last})
            silences.append(server.silence().own)
            statuses.append(answer.status)
            if answer.status == 200:
                last = {"previous_response_id": answer.json()["id"]}
    assert statuses[:3] == [200] * 3
    assert 400 in statuses  # the chain may not grow for ever
    assert statuses[-1] == 200
    assert max(silences) < MAX_SILENCE, silences


def _write_table(rows: list[tuple[float, float, float, float, float, str, str]]) -> None:
    if not (path := os.environ.get("PENSTOCK_HEAVY_TABLE")):
        return
    over = sum(row[0] > 0.05 for row in rows)
    lines = [f"{len(rows)} bodies; {over} of them silenced the event loop for more than 50 ms; the worst:", ""]
    lines += ["| body | status | loop silent, own time | as seen | stream | /health | answered in |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for own, seen, stream, health, seconds, status, name in rows[:25]:
        times = " | ".join(f"{value * 1e3:.0f} ms" for value in (own, seen, stream, health, seconds))
        lines.append(f"| {name} | {status} | {times} |")
    Path(path).write_text("\n".join(lines) + "\n")
