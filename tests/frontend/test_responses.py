"""/v1/responses with the official client: whole, streamed, stored, continued, with tools and reasoning."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response as ClientResponse

from penstock.core.config.api_keys import digest
from penstock.frontend.errors import ResponseNotFound
from penstock.frontend.response_store import ResponseStore
from tests.frontend.checkpoint_folder import write_checkpoint
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import error_of, get, post, send
from tests.frontend.live_server import LiveServer, live_server
from tests.frontend.test_tools import CALL, TEMPLATE, THOUGHT

TEXT = "Water runs down the pipe."
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


@pytest.fixture(scope="module")
def response_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("responses"), chat_template=TEMPLATE)
    options = {"max_stored_responses": 4}
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        live_server(folder, Path(sockets), frontend=options) as live,
    ):
        yield live


@pytest.fixture
def live(response_server: LiveServer) -> LiveServer:
    response_server.reset()
    return response_server


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def create(client: openai.OpenAI, given: Any = "Hello", **fields: Any) -> ClientResponse:
    response: ClientResponse = client.responses.create(model="test/model", input=given, **fields)
    return response


def stream(client: openai.OpenAI, given: Any = "Hello", **fields: Any) -> list[Any]:
    return list(client.responses.create(model="test/model", input=given, stream=True, **fields))


def prompt_text(live: LiveServer) -> str:
    return live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))


def without_ids(response: Any) -> Any:
    """A response's facts that do not differ from one request to the next."""
    found = json.loads(response.to_json())
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return {key: value for key, value in found.items() if key not in ("id", "created_at")}


def test_a_text(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    response = create(client, instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=99)
    assert response.id.startswith("resp_")
    assert (response.object, response.status, response.model) == ("response", "completed", "test/model")
    assert response.output_text == TEXT
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be kind.", {"a": "b"}, 99)
    assert response.usage is not None
    assert response.usage.output_tokens == len(live.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert prompt_text(live) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_length_limit(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    response = create(client, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert stream(client, max_output_tokens=2)[-1].type == "response.incomplete"


def test_events_of_a_text(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT, delay=0.002)
    events = stream(client)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT
    assert len(deltas) > 2
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == "in_progress"
    assert events[-1].response.output_text == TEXT
    assert events[-1].response.id == events[0].response.id
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


@pytest.mark.parametrize("output", ["", TEXT, CALL, THOUGHT + TEXT, THOUGHT + "I look.\n" + CALL + CALL])
@pytest.mark.parametrize("per_step", [1, 9, 1000])
def test_streamed_and_whole_responses_are_equal(
    client: openai.OpenAI, live: LiveServer, output: str, per_step: int
) -> None:
    live.says(output, per_step=per_step)
    whole = create(client, tools=[WEATHER])
    events = stream(client, tools=[WEATHER])
    assert without_ids(events[-1].response) == without_ids(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in events[-1].response.output]
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        pieces = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        ends = [event for event in events if event.type == f"response.{kind}.done"]
        assert pieces == "".join(e.arguments if kind == "function_call_arguments" else e.text for e in ends)
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == list(range(len(whole.output)))


def test_calls_and_reasoning(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(THOUGHT + "I look.\n" + CALL)
    response = create(client, tools=[WEATHER])
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Let me see."]
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Tromsø"}, "completed")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 5
    live.says("Cold.")
    history: list[Any] = [
        {"role": "user", "content": "Weather?"},
        *[item.to_dict() for item in response.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "-3"},
    ]
    assert create(client, history, tools=[WEATHER]).output_text == "Cold."
    text = prompt_text(live)
    assert '<think>Let me see.</think>I look.<tool_call>get_weather {"city": "Tromsø"}</tool_call><|im_end|>' in text
    assert f"<|im_start|>tool\n-3 ({call.call_id})<|im_end|>" in text


def test_a_response_goes_on_from_another(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    first = create(client, "One", instructions="Be kind.")
    second = create(client, [{"role": "user", "content": "Two"}], previous_response_id=first.id)
    third = stream(client, "Three", previous_response_id=second.id)[-1].response
    assert third.previous_response_id == second.id
    assert prompt_text(live) == (
        f"<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n"
        f"<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n{TEXT}<|im_end|>\n"
        "<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\n"
    )
    assert client.responses.retrieve(third.id).output_text == TEXT


def test_stored_responses(client: openai.OpenAI, live: LiveServer) -> None:
    live.says(TEXT)
    first = create(client)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(first.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    unwanted = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unwanted.id)
    many = [create(client) for _ in range(5)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(many[0].id)
    assert client.responses.retrieve(many[1].id).id == many[1].id
    assert error_of(get(live, f"/v1/responses/{many[1].id}?stream=true"), 400)["param"] == "stream"
    assert send(live, "DELETE", f"/v1/responses/{many[1].id}").json() == {
        "id": many[1].id,
        "object": "response",
        "deleted": True,
    }


def test_the_store_is_bounded_in_bytes() -> None:
    store = ResponseStore(10, 300)
    for name in "abc":
        store.put("", name, b"x" * 100, [])
    assert store.num_bytes == 204
    with pytest.raises(ResponseNotFound):
        store.get("", "a")
    store.get("", "b")  # used, so "c" goes first
    store.put("", "d", b"x" * 150, [])
    assert (len(store), store.num_bytes) == (2, 254)
    with pytest.raises(ResponseNotFound):
        store.items("", "c")
    store.put("", "e", b"x" * 301, [])
    assert len(store) == 2
    store.delete("", "b")
    store.delete("", "d")
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_is_its_key_s_alone(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    entries = [f'[[keys]]\nid = "{key}"\nsha256 = "{digest(key).hex()}"\nscopes = ["infer"]\n' for key in ("a", "b")]
    keys.write_text("".join(entries))
    with live_server(checkpoint, sockets, frontend={"api_keys_file": str(keys)}) as live:
        mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        path = "/v1/responses/" + post(live, "/v1/responses", {"input": "Hello"}, **mine).json()["id"]
        assert error_of(get(live, path, **other), 404)["code"] == "response_not_found"
        assert error_of(send(live, "DELETE", path, None, **other), 404)["code"] == "response_not_found"
        body = {"input": "Go on", "previous_response_id": path.rpartition("/")[2]}
        assert error_of(post(live, "/v1/responses", body, **other), 404)["param"] == "previous_response_id"
        assert get(live, path, **mine).status == 200
        assert post(live, "/v1/responses", body, **mine).status == 200


def test_a_failure_after_the_first_byte(client: openai.OpenAI, live: LiveServer) -> None:
    live.says("Water runs", error="a device error", delay=0.02)
    kinds = []
    response_id = ""
    for event in client.responses.create(model="test/model", input="Hello", stream=True):
        kinds.append(event.type)
        if event.type == "response.created":
            response_id = event.response.id
        elif event.type == "response.failed":
            assert event.response.error is not None
            assert "a device error" in event.response.error.message
    assert kinds[-2:] == ["response.failed", "error"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"role": "a b", "content": "x"}]}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "magic"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": ["x"]}]}, "input[0].type"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
    ({"tools": [WEATHER | {"strict": True}], "text": {"format": {"type": "json_object"}}}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "low"}}, "reasoning_effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"metadata": {"a" * 65: "x"}}, "metadata"),
    ({"conversation": "c"}, "conversation"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"prompt_logprobs": False}, "prompt_logprobs"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_bad_requests(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(post(live, "/v1/responses", {"input": "Hello"} | fields), 400)["param"] == param
