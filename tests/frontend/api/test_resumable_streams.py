"""Streams that outlive their connections: cut at any byte and continued, they are what they would have been."""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.api_keys import digest
from penstock.frontend.streams.kept import Bounds
from tests.faults.soak import IS_SOAK
from tests.frontend.cut_streams import CutClient
from tests.frontend.http_client import HELLO, chat, error_of, get, post, send
from tests.frontend.live_server import LiveServer, live_server

NUM_CUTS = 50 if IS_SOAK else 5
TEXT = "It goes on, and on; nothing of it is lost. " * 6

KINDS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}, b"\n\n"),
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 400}, b"\n\n"),
    "several": ("/v1/completions", {"prompt": "Hello", "max_tokens": 400, "n": 3, "logprobs": 2}, b"\n\n"),
    "response": ("/v1/responses", {"input": "Hello"}, b"\n\n"),
    "message": ("/v1/messages", {"messages": HELLO, "max_tokens": 300}, b"\n\n"),
    "ollama": ("/api/chat", {"model": "test/model", "messages": HELLO}, b"\n"),
}


def text_of(kind: str, stream: list[bytes]) -> str:
    """What a stream says, of all its choices."""
    found: dict[int, str] = {}
    for event in stream:
        data = event if kind == "ollama" else event.rpartition(b"data: ")[2]
        if data == b"[DONE]":
            continue
        fields = json.loads(data)
        match kind:
            case "chat" | "completion" | "several":
                for choice in fields["choices"]:
                    piece = choice["text"] if kind != "chat" else choice["delta"].get("content", "")
                    found[choice["index"]] = found.get(choice["index"], "") + piece
            case "response":
                found[0] = found.get(0, "") + (fields["delta"] if fields["type"].endswith("text.delta") else "")
            case "message":
                found[0] = found.get(0, "") + fields.get("delta", {}).get("text", "")
            case "ollama":
                found[0] = found.get(0, "") + fields["message"]["content"]
    return "|".join(found[index] for index in sorted(found))


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_cut_anywhere_is_whole(kind: str, live: LiveServer) -> None:
    path, body, mark = KINDS[kind]
    live.says(TEXT, delay=0.002)
    body = body | {"stream": True}
    plain = post(live, path, body)
    assert plain.status == 200, plain.text
    assert b"\nid: " not in plain.content
    undisturbed = text_of(kind, [e for e in plain.content.split(mark)[:-1] if not e.startswith(b":")])
    assert TEXT in undisturbed
    drawn = random.Random(kind)
    cut = CutClient(live, f"cut-{kind}", mark)
    total = len(plain.content)
    cut.post(path, body, drawn.randrange(total * 2 // NUM_CUTS))
    for number in range(NUM_CUTS):
        cut.go_on(drawn.randrange(total * 2 // NUM_CUTS) if number < NUM_CUTS - 1 else None, by_header=number % 2 == 1)
    assert cut.is_complete
    assert text_of(kind, cut.events) == undisturbed
    again = post(live, path, body, **{"x-resumable": "true", "x-request-id": f"cut-{kind}"})
    assert again.status == 409, again.text
    assert send(live, "DELETE", f"/v1/streams/cut-{kind}").status == 200
    assert get(live, f"/v1/streams/cut-{kind}").status == 404


def test_a_client_that_leaves_before_the_first_byte(live: LiveServer) -> None:
    live.says(TEXT, delay=0.01)
    cut = CutClient(live, "early", before_leaving=lambda: live.wait_until(lambda: len(live.scheduler.added) == 1))
    cut.post("/v1/chat/completions", {"messages": HELLO, "stream": True}, 0)
    cut.before_leaving = lambda: None
    cut.go_on()
    assert cut.is_complete
    assert text_of("chat", cut.events) == TEXT


def test_without_the_header_a_request_ends_with_its_connection(live: LiveServer) -> None:
    live.gives([5] * 20, hangs=True)
    cut = CutClient(live, "plain")
    cut.post("/v1/completions", {"prompt": "a", "max_tokens": 400, "stream": True}, 50, is_resumable=False)
    live.wait_until(lambda: len(live.scheduler.aborted) > 0)
    assert live.server.service.streams.find("", "plain") is None


def test_only_streams_are_kept(live: LiveServer) -> None:
    before = len(live.server.service.streams)
    answer = chat(live)
    assert "x-penstock-stream" not in answer.headers
    answer = post(live, "/v1/chat/completions", {"messages": HELLO}, **{"x-resumable": "true"})
    assert "not a stream" in answer.headers["x-penstock-warning"]
    bad = post(live, "/v1/chat/completions", {"messages": HELLO}, **{"x-resumable": "perhaps"})
    assert error_of(bad, 400)["param"] == "x-resumable"
    body = {"messages": HELLO, "stream": True, "n": 0}
    assert post(live, "/v1/chat/completions", body, **{"x-resumable": "true"}).status == 400
    assert len(live.server.service.streams) == before
    assert get(live, "/v1/streams/x?starting_after=-1").status == 400


def test_stopping_a_stream(live: LiveServer) -> None:
    live.gives([5] * 20, hangs=True)
    cut = CutClient(live, "stopped")
    cut.post("/v1/completions", {"prompt": "a", "max_tokens": 400, "stream": True}, 400)
    assert send(live, "DELETE", "/v1/streams/stopped").json() == {"id": "stopped", "object": "stream", "deleted": True}
    live.wait_until(lambda: live.scheduler.num_running == 0)
    assert error_of(get(live, "/v1/streams/stopped"), 404)["code"] == "stream_not_found"


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """Room for two streams, of 4 KiB each; two keys."""
    keys = tmp_path / "keys.toml"
    entries = [f'[[keys]]\nid = "{key}"\nsha256 = "{digest(key).hex()}"\nscopes = ["infer"]\n' for key in ("a", "b")]
    keys.write_text("".join(entries))
    monkeypatch.setattr("penstock.frontend.api.service.Bounds", lambda: Bounds(4096, 600.0))
    options = {"api_keys_file": str(keys), "max_resumable_bytes": 8192}
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        live_server(checkpoint, Path(sockets), frontend=options) as live,
    ):
        yield live


def test_another_key_does_not_see_it(small: LiveServer) -> None:
    small.says(TEXT)
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    body = {"messages": HELLO, "stream": True, "max_tokens": 3}
    answer = post(small, "/v1/chat/completions", body, **mine, **{"x-resumable": "true"})
    path = answer.headers["x-penstock-stream"]
    unknown = error_of(get(small, "/v1/streams/unknown", **other), 404)
    assert error_of(get(small, path, **other), 404)["code"] == unknown["code"]
    assert send(small, "DELETE", path, None, **other).status == 404
    assert get(small, path, **mine).content == answer.content
    assert get(small, path, **mine, **{"Last-Event-ID": "0"}).content == answer.content.partition(b"\n\n")[2]


def test_the_buffer_is_bounded_and_nothing_unread_is_lost(small: LiveServer) -> None:
    """Nobody reads: the request is paused. Somebody does: what is far behind goes."""
    small.says(TEXT * 2, delay=0.005)
    cut = CutClient(small, "long", headers={"Authorization": "Bearer a"})
    cut.post("/v1/chat/completions", {"messages": HELLO, "stream": True}, 300)
    small.wait_until(lambda: small.scheduler.num_paused == 1)
    kept = small.server.service.streams.find("a", "long")
    assert kept is not None
    assert kept.num_bytes < 4096 + 1024
    cut.go_on()
    assert text_of("chat", cut.events) == TEXT * 2
    assert kept.num_bytes <= 4096
    late = get(small, "/v1/streams/long?starting_after=0", **cut.headers)
    assert error_of(late, 410)["code"] == "stream_events_gone"
    assert get(small, f"/v1/streams/long?starting_after={cut.last_id - 1}", **cut.headers).text.endswith("[DONE]\n\n")


def test_one_key_leaves_room_for_others(small: LiveServer) -> None:
    small.gives([5] * 3, hangs=True)
    mine, others = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    client = CutClient(small, "s0", headers=mine)
    body = {"messages": HELLO, "stream": True}
    client.post("/v1/chat/completions", body, 300)
    full = error_of(post(small, "/v1/chat/completions", body, **mine, **{"x-resumable": "true"}), 429)
    assert full["code"] == "streams_full"
    other = CutClient(small, "s1", headers=others)
    other.post("/v1/chat/completions", body, 300)
    assert error_of(post(small, "/v1/chat/completions", body, **others, **{"x-resumable": "true"}), 429)
    assert send(small, "DELETE", "/v1/streams/s0", None, **mine).status == 200
    small.says("Hi")
    for _ in range(2):  # one that has ended makes room
        answer = post(small, "/v1/chat/completions", body, **mine, **{"x-resumable": "true"})
        assert answer.text.endswith("data: [DONE]\n\n")


def test_nobody_comes_back(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.api.service.Bounds", lambda: Bounds(seconds=0.2))
    with live_server(checkpoint, sockets) as live:
        live.gives([5] * 3, hangs=True)
        CutClient(live, "left").post("/v1/completions", {"prompt": "a", "stream": True}, 300)
        live.wait_until(lambda: len(live.scheduler.aborted) > 0)
        live.wait_until(lambda: len(live.server.service.streams) == 0)
        live.wait_until(lambda: len(live.server.service.generations) == 0)


def test_a_server_that_keeps_none(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, frontend={"max_resumable_bytes": 0}) as live:
        body = {"messages": HELLO, "stream": True}
        answer = post(live, "/v1/chat/completions", body, **{"x-resumable": "true"})
        assert "keeps no streams" in answer.headers["x-penstock-warning"]
        assert b"id: " not in answer.content.replace(b'"id":', b"")
