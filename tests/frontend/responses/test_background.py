"""Background responses and conversations, by OpenAI's own client."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response as OpenAIResponse

from penstock.config.api_keys import digest
from penstock.parts.responses.frontend.storage import responses as store
from penstock.parts.responses.options import ResponseOptions
from tests.frontend.http_client import error_of, get, post, send
from tests.frontend.live_server import LiveServer, live_server

TEXT = "It goes on behind the scenes. " * 3


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def finished(client: openai.OpenAI, response_id: str) -> OpenAIResponse:
    """Poll, as OpenAI's guide does."""
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_response_is_polled_until_it_is_there(live: LiveServer, client: openai.OpenAI) -> None:
    live.says(TEXT, delay=0.002)
    begun = client.responses.create(model="test/model", input="Hello", background=True)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    found = finished(client, begun.id)
    assert (found.status, found.output_text, found.background) == ("completed", TEXT, True)
    assert found.usage is not None
    after = client.responses.create(model="test/model", input="More", previous_response_id=begun.id)
    assert after.output_text == TEXT


def test_it_is_followed_from_any_event(live: LiveServer, client: openai.OpenAI) -> None:
    live.says(TEXT, delay=0.002)
    events = []
    with client.responses.create(model="test/model", input="Hello", background=True, stream=True) as stream:
        for event in stream:
            events.append(event)
            if len(events) == 8:
                break  # the connection ends here
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(8))
    response_id = events[0].response.id  # type: ignore[union-attr]
    for event in client.responses.retrieve(response_id, stream=True, starting_after=7):
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-1].type == "response.completed"
    live.do(live.server.service.streams.close)  # what is forgotten is told by its last event
    late = list(client.responses.retrieve(response_id, stream=True, starting_after=7))
    assert [(event.type, event.sequence_number) for event in late] == [("response.completed", 8)]


def test_it_is_cancelled(live: LiveServer, client: openai.OpenAI) -> None:
    live.gives([5] * 3, hangs=True)
    begun = client.responses.create(model="test/model", input="Hello", background=True)
    assert client.responses.cancel(begun.id).status == "cancelled"
    live.wait_until(lambda: live.scheduler.num_running == 0)
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    live.says("Hi")
    done = client.responses.create(model="test/model", input="Hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_a_deleted_one_does_not_come_back(live: LiveServer, client: openai.OpenAI) -> None:
    live.gives([5] * 3, hangs=True)
    begun = client.responses.create(model="test/model", input="Hello", background=True)
    client.responses.delete(begun.id)
    live.wait_until(lambda: live.scheduler.num_running == 0)
    live.wait_until(lambda: len(live.server.service.generations) == 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)


def test_its_failure_is_stored(live: LiveServer, client: openai.OpenAI) -> None:
    live.gives([5] * 3, error="it broke", delay=0.01)
    found = finished(client, client.responses.create(model="test/model", input="Hello", background=True).id)
    assert found.status == "failed"
    assert found.error is not None
    assert found.error.code == "server_error"


def test_it_dies_with_its_frontend(
    checkpoint: Path, sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LEASE_SECONDS", 0.0)
    with live_server(checkpoint, sockets, frontend={"data_dir": str(tmp_path)}) as live:
        live.gives([5] * 3, hangs=True)
        begun = post(live, "/v1/responses", {"input": "Hello", "background": True}).json()
        found = get(live, f"/v1/responses/{begun['id']}").json()  # its lease is over: as if another frontend looked
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")


def test_what_cannot_be_in_the_background(checkpoint: Path, sockets: Path) -> None:
    without: dict[str, dict[str, Any]] = {
        "--max-resumable-bytes": {"frontend": {"max_resumable_bytes": 0}},
        "--max-stored-response-bytes": {"parts": (ResponseOptions(max_stored_response_bytes=0),)},
    }
    for option, options in without.items():
        own = sockets / option
        own.mkdir()
        with live_server(checkpoint, own, **options) as live:
            refused = error_of(post(live, "/v1/responses", {"input": "a", "background": True}), 400)
            assert (refused["code"], refused["param"]) == ("unsupported_parameter", "background")
            assert f"({option})" in refused["message"]


@pytest.fixture
def apart(checkpoint: Path, sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr("penstock.parts.responses.frontend.part.MAX_STORED", 2)
    keys = tmp_path / "keys.toml"
    entries = [f'[[keys]]\nid = "{key}"\nsha256 = "{digest(key).hex()}"\nscopes = ["infer"]\n' for key in ("a", "b")]
    keys.write_text("".join(entries))
    options = {"api_keys_file": str(keys), "data_dir": str(tmp_path / "data")}
    with live_server(checkpoint, sockets, frontend=options) as live:
        yield live


def test_a_conversation_from_its_creation_to_its_end(live: LiveServer, client: openai.OpenAI) -> None:
    live.says("Fine.")
    made = client.conversations.create(
        metadata={"topic": "demo"}, items=[{"type": "message", "role": "user", "content": "Hello!"}]
    )
    assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    added = client.conversations.items.create(
        made.id,
        items=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How are you?"}]}],
    )
    assert [item.type for item in added.data] == ["message"]
    answered = client.responses.create(model="test/model", input="Well?", conversation=made.id)
    assert answered.conversation is not None
    assert answered.conversation.id == made.id
    listed = list(client.conversations.items.list(made.id, order="asc", limit=2))  # pages of two
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr, index]
    assert texts == ["Hello!", "How are you?", "Well?", "Fine."]
    live.says("Good.")
    client.responses.create(model="test/model", input="And?", conversation={"id": made.id})
    prompt = live.tokenizer.decode(list(memoryview(live.scheduler.added[-1].prompt_token_ids).cast("i")))
    assert [prompt.count(text) for text in ("Hello!", "Well?", "Fine.", "And?")] == [1, 1, 1, 1]
    newest = client.conversations.items.list(made.id, limit=1).data[0]
    assert client.conversations.items.retrieve(newest.id or "", conversation_id=made.id) == newest
    assert client.conversations.items.delete(newest.id or "", conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(newest.id or "", conversation_id=made.id)
    assert len(list(client.conversations.items.list(made.id))) == 5
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="test/model", input="Well?", conversation=made.id)


def test_a_background_response_adds_to_its_conversation(live: LiveServer, client: openai.OpenAI) -> None:
    live.says("Fine.")
    made = client.conversations.create()
    finished(client, client.responses.create(input="Well?", conversation=made.id, background=True).id)
    assert len(list(client.conversations.items.list(made.id))) == 2


def test_what_a_conversation_refuses(live: LiveServer) -> None:
    path = "/v1/conversations"
    message = {"type": "message", "role": "user", "content": "Hi"}
    assert error_of(post(live, path, {"items": [message] * 21}), 400)["param"] == "items"
    assert error_of(post(live, path, {"metadata": {"a": "x" * 513}}), 400)["param"] == "metadata"
    assert error_of(post(live, path, {"items": [{"type": "computer_call"}]}), 400)
    made = post(live, path, {"items": [message | {"id": "msg_1"}]}).json()
    again = post(live, f"{path}/{made['id']}/items", {"items": [message | {"id": "msg_1"}]}).json()
    assert again["data"][0]["id"] != "msg_1"
    assert error_of(get(live, f"{path}/{made['id']}/items?after=none"), 400)["param"] == "after"
    assert error_of(get(live, f"{path}/{made['id']}/items/none"), 404)["code"] == "item_not_found"
    for method in ("GET", "DELETE"):
        assert error_of(send(live, method, f"{path}/conv_none"), 404)["code"] == "conversation_not_found"
    assert error_of(post(live, f"{path}/conv_none", {"metadata": {}}), 404)


def test_all_of_it_is_its_key_s_alone(apart: LiveServer) -> None:
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    made = post(apart, "/v1/conversations", {}, **mine).json()
    path = f"/v1/conversations/{made['id']}"
    item = {"type": "message", "role": "user", "content": "Hi"}
    added = post(apart, f"{path}/items", {"items": [item]}, **mine).json()["data"][0]["id"]
    assert get(apart, f"{path}/items/{added}", **mine).status == 200
    for place in (path, f"{path}/items", f"{path}/items/{added}"):
        assert error_of(get(apart, place, **other), 404)["code"] == "conversation_not_found"
    for place in (path, f"{path}/items/{added}"):
        assert send(apart, "DELETE", place, None, **other).status == 404
    assert post(apart, f"{path}/items", {"items": [item]}, **other).status == 404
    body = {"input": "Hello", "conversation": made["id"]}
    assert post(apart, "/v1/responses", body, **other).status == 404
    apart.gives([5] * 3, hangs=True)
    begun = post(apart, "/v1/responses", {"input": "Hello", "background": True}, **mine).json()
    assert get(apart, f"/v1/responses/{begun['id']}?stream=true", **other).status == 404
    assert get(apart, f"/v1/streams/{begun['id']}", **other).status == 404
    assert send(apart, "POST", f"/v1/responses/{begun['id']}/cancel", None, **other).status == 404
    assert send(apart, "POST", f"/v1/responses/{begun['id']}/cancel", None, **mine).json()["status"] == "cancelled"
    for _ in range(2):  # the third conversation is one too many
        post(apart, "/v1/conversations", {}, **mine)
    assert get(apart, path, **mine).status == 404
