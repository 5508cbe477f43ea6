"""POST /v1/responses/compact: a summary that the model writes, and that later requests read."""

from typing import Any

import openai
import pytest

from penstock.parts.responses.frontend.compaction import DEFAULT_TOKENS
from penstock.parts.responses.frontend.summaries import opened, sealed
from tests.frontend.http_client import error_of, get, post
from tests.frontend.live_server import LiveServer
from tests.frontend.parsing.test_tools import THOUGHT
from tests.frontend.responses.conftest import prompt_text

SUMMARY = "The user builds a bridge. Left to do: the railing. 🌉"
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Build a bridge"},
    {"type": "function_call", "call_id": "c", "name": "build", "arguments": '{"what": "bridge"}'},
    {"type": "function_call_output", "call_id": "c", "output": "built"},
    {"role": "assistant", "content": "It stands."},
    {"role": "user", "content": [{"type": "input_text", "text": "And a railing"}]},
]


def test_a_conversation_becomes_a_summary(agent_client: openai.OpenAI, agent: LiveServer) -> None:
    agent.says(f"{THOUGHT}{SUMMARY}\n")
    found = agent_client.responses.compact(model="test/model", input=ITEMS, instructions="You build.")
    assert (found.object, found.id[:5]) == ("response.compaction", "resp_")
    prompt = prompt_text(agent)
    assert prompt.index("You build.") < prompt.index("bridge") < prompt.index("built") < prompt.index("Summarize")
    assert agent.scheduler.added[-1].sampling.max_tokens == DEFAULT_TOKENS
    assert found.usage.input_tokens == len(agent.tokenizer.encode(prompt, add_special_tokens=False))
    assert found.usage.output_tokens > found.usage.output_tokens_details.reasoning_tokens > 0
    first, second, compaction = (item.to_dict(warnings=False) for item in found.output)
    assert [first["content"], second["content"]] == [
        [{"type": "input_text", "text": "Build a bridge"}],
        [{"type": "input_text", "text": "And a railing"}],
    ]
    assert compaction["type"] == "compaction"
    assert SUMMARY not in str(compaction["encrypted_content"])
    agent.says("Good.")
    answer = post(agent, "/v1/responses", {"input": [first, second, compaction, {"role": "user", "content": "Go on"}]})
    assert "x-penstock-warning" not in answer.headers
    prompt = prompt_text(agent)
    assert prompt.index("And a railing") < prompt.index(SUMMARY) < prompt.index("Go on")
    assert "built" not in prompt
    agent.says("Shorter.")  # a summary is summarized like anything else
    again = agent_client.responses.compact(model="test/model", previous_response_id=answer.json()["id"])
    assert SUMMARY in prompt_text(agent)
    assert [item.type for item in again.output] == ["message", "message", "message", "compaction"]


def test_nothing_is_stored(agent: LiveServer) -> None:
    agent.says(SUMMARY)
    made = post(agent, "/v1/responses/compact", {"input": "Hello"}).json()
    assert error_of(get(agent, f"/v1/responses/{made['id']}"), 404)["code"] == "response_not_found"


def test_a_summary_is_bounded(agent: LiveServer) -> None:
    agent.says(SUMMARY)
    answer = post(agent, "/v1/responses/compact", {"input": "Hello", "max_output_tokens": 9})
    assert answer.status == 200
    assert answer.headers["x-penstock-warning"] == "output: the summary was cut off after 9 tokens"
    assert SUMMARY.startswith(opened(answer.json()["output"][-1]["encrypted_content"]))


def test_what_cannot_be_compacted(agent: LiveServer) -> None:
    path = "/v1/responses/compact"
    for body, param in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "magic"}]}, "input[0].type"),
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "model": "other"}, "model"),
    ):
        assert post(agent, path, body).json()["error"]["param"] == param, body
    assert error_of(post(agent, path, {"input": "x " * 5000}), 400)["code"] == "context_length_exceeded"
    agent.says(THOUGHT)
    assert error_of(post(agent, path, {"input": "x"}), 500)["code"] == "no_summary"
    cut_off = error_of(post(agent, path, {"input": "x", "max_output_tokens": 2}), 400)
    assert cut_off["param"] == "max_output_tokens"
    assert error_of(get(agent, path), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("text", ["", "a", SUMMARY, "x" * 10_000])
def test_a_sealed_summary_is_read_again(text: str) -> None:
    assert opened(sealed(text)) == text
    for wrong in (None, 5, "gAAAA", "penstock:%%%", "penstock:/w=="):
        assert opened(wrong) == ""
