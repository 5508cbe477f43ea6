"""Nobody's body keeps others waiting: the longest silence of a frontend's event loop while heavy ones come.

The whole family is some thousand bodies at `--max-body-bytes`; `PENSTOCK_SOAK=1` sends them all, and writes a table of
the worst ones to the file that `PENSTOCK_HEAVY_TABLE` names.
"""

import asyncio
import http.client
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.api_keys import digest
from penstock.frontend.api.service import MAX_QUICK
from penstock.frontend.heavy_turns import LARGE_BYTES, heavy_turn
from penstock.frontend.text.child_pool import ChildPool
from tests.faults.soak import IS_SOAK
from tests.frontend.api.heavy_bodies import FORMS, HeavyBody, heavy_bodies
from tests.frontend.checkpoint_folder import CHATML, byte_level_tokenizer, write_checkpoint
from tests.frontend.http_client import post
from tests.frontend.live_server import LiveServer, made_server
from tests.frontend.probed_server import ProbedServer, probed_server

MAX_BODY_BYTES = 8 << 20

MAX_SILENCE = 0.25
"""Seconds. The aim is 0.05; machines differ, and may be busy."""

MAX_TURN = 0.1
"""Seconds that the event loop's thread may compute in one turn: 0.05 on a quiet machine, and twice that beside others,
with whom it shares caches and the two halves of a core."""

TEMPLATE = CHATML + "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"

_FILLING = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")

_WORST = (
    *(f"form: {kind}" for kind in FORMS),
    "content: special tokens",
    "content: beginnings of special tokens",
    "input_prefix: beginnings of special tokens",
    "input_extra: short strings",
    "prompt: unfinished special tokens",
    "tools: messages",
    "stop: words",
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


def _send(server: ProbedServer, body: bytes, route: str, content_type: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST", route, body, {"Content-Type": content_type})
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
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([*_FILLING, *(f"<unused{i}>" for i in range(6000))])  # as many as Gemma has
    folder = write_checkpoint(tmp_path / "model", tokenizer=tokenizer, chat_template=TEMPLATE)
    options: dict[str, Any] = {"max_body_bytes": MAX_BODY_BYTES, "data_dir": str(tmp_path / "data")}
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        probed_server(folder, Path(sockets), max_model_len=1 << 17, **options) as server,
        _honest_clients(server) as longest,
    ):
        assert post(server, "/v1/completions", {"prompt": "Hello", "max_tokens": 1}).status == 200
        for body in _chosen():
            content = body.make(MAX_BODY_BYTES)
            time.sleep(0.02)
            server.silence()
            longest.update(stream=0.0, health=0.0)
            begun = time.monotonic()
            status = _send(server, content, body.route, body.content_type)
            seconds = time.monotonic() - begun
            time.sleep(0.02)
            silence = server.silence()
            waits = (longest["stream"], longest["health"], seconds)
            rows.append((silence.turn, silence.own, silence.seen, *waits, status, str(body)))
    rows.sort(reverse=True)
    _write_table(rows)
    assert not [row[-1] for row in rows if row[6] in ("500", "503", "none in a minute")]
    late = [f"{row[0]:.3f}, {row[1]:.2f} s: {row[-1]}" for row in rows if row[0] > MAX_TURN or row[1] > MAX_SILENCE]
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


def _post_all(server: ProbedServer, route: str, bodies: Sequence[dict[str, Any]], **headers: str) -> list[int]:
    """Send all of them at once; the statuses."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return [
            each.status for each in threads.map(lambda body: post(server, route, body, **headers), bodies, timeout=250)
        ]


async def test_large_steps_that_are_ready_at_once_run_in_turns_of_their_own() -> None:
    number, ran = 0, list[int]()

    async def count_turns() -> None:
        nonlocal number
        while True:
            number += 1
            await asyncio.sleep(0)

    async def work() -> None:
        await heavy_turn()
        ran.append(number)
        await heavy_turn()
        ran.append(number)
        await heavy_turn(LARGE_BYTES - 1)  # does not wait
        assert ran[-1] == number

    counting = asyncio.create_task(count_turns())
    await asyncio.gather(*(work() for _ in range(10)))
    counting.cancel()
    assert len(set(ran)) == 20


@pytest.mark.long
def test_references_at_once_silence_nobody(tmp_path: Path) -> None:
    """A few bytes bring much along, and several requests do so at the same time."""
    folder = write_checkpoint(tmp_path / "model", chat_template=TEMPLATE)
    options: dict[str, Any] = {"max_body_bytes": MAX_BODY_BYTES, "data_dir": str(tmp_path / "data")}
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        probed_server(folder, Path(sockets), max_model_len=1 << 18, **options) as server,
    ):
        ids = []
        for number in range(10):
            parts = [{"type": "input_text", "text": "x" * 20}] * 8
            items = [{"id": f"msg_{number}_{i}", "role": "user", "content": parts} for i in range(500)]
            assert post(server, "/v1/responses", {"input": items, "max_output_tokens": 1}).status == 200
            ids += [item["id"] for item in items[:100]]
        body = {"input": [{"type": "item_reference", "id": each} for each in ids], "max_output_tokens": 1}
        server.silence()
        statuses = _post_all(server, "/v1/responses", [body] * 6)
        silence = server.silence()
    assert statuses == [200] * 6
    assert silence.turn < MAX_TURN / 2, silence
    assert silence.own < MAX_SILENCE, silence


def test_two_clients_with_the_worst_messages_do_not_keep_a_third_waiting(tmp_path: Path) -> None:
    """However slow the machine is: what begins between the third one's arrival and its own turn is counted."""
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nid = "{k}"\nsha256 = "{digest(k).hex()}"\n' for k in ("a", "b", "honest")))
    texts = [unit * (125_000 // len(unit)) for unit in ("<", "<unused1>", "<|im_start|>", "<unused")]
    asked: list[bytes] = []
    ask = ChildPool._ask_up_to_twice

    async def noted(pool: ChildPool, line: bytes, *arguments: Any) -> list[Any]:
        asked.append(line)
        return await ask(pool, line, *arguments)

    special = [*_FILLING, *(f"<unused{i}>" for i in range(6000))]
    options: dict[str, Any] = {"api_keys_file": str(keys)}
    with (
        pytest.MonkeyPatch.context() as patch,
        made_server(tmp_path / "m", special_tokens=special, max_model_len=1 << 18, frontend=options) as live,
        ThreadPoolExecutor(24) as threads,
    ):
        patch.setattr(ChildPool, "_ask_up_to_twice", noted)
        assert _status(live, "honest", "hello") == 200
        assert _status(live, "a", texts[1]) == 200  # both processes run from now on
        asked.clear()
        attacks = [threads.submit(_status, live, "ab"[i % 2], texts[i % 4]) for i in range(24)]
        live.wait_until(lambda: live.server.service.prompts._children._slots.num_waiting >= 18)
        for number in range(3):
            num_before = len(asked)
            text = f"hello {number}"
            assert _status(live, "honest", text) == 200
            at = next(i for i, line in enumerate(asked) if text.encode() in line)
            long = [line for line in asked[num_before:at] if len(line) > MAX_QUICK]
            assert len(long) <= 1, "of the others' long questions at most the next one began before"
        assert sum(not each.done() for each in attacks) > 6, "the others were still waiting"
        assert {each.result(250) for each in attacks} == {200}


def _status(live: LiveServer, key: str, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return post(live, "/v1/chat/completions", body, Authorization=f"Bearer {key}").status


def _write_table(rows: list[tuple[float, float, float, float, float, float, str, str]]) -> None:
    if not (path := os.environ.get("PENSTOCK_HEAVY_TABLE")):
        return
    over = sum(row[0] > 0.05 for row in rows)
    lines = [f"{len(rows)} bodies; {over} of them silenced the event loop for more than 50 ms; the worst:", ""]
    lines += ["| body | status | costliest turn | loop silent, own time | as seen | stream | /health | answered in |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for *waits, status, name in rows[:25]:
        times = " | ".join(f"{value * 1e3:.0f} ms" for value in waits)
        lines.append(f"| {name} | {status} | {times} |")
    Path(path).write_text("\n".join(lines) + "\n")
