"""What a coding agent in a terminal sends to /v1/messages: a long system prompt in cached blocks, reminders between the
turns, thinking handed back, everything streamed, and prompts counted before."""

from typing import Any

import anthropic
import pytest

from tests.agents.conftest import ServerOf
from tests.agents.script import ANSWER, NEXT_ANSWER, NEXT_QUESTION, QUESTION, THOUGHT, TIME, WEATHER
from tests.agents.scripted_server import MODEL

KNOWN = {"get_weather": WEATHER, "get_time": TIME}
CACHED = {"type": "ephemeral"}


def tool(name: str) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"name": name, "description": "Knows.", "input_schema": schema, "eager_input_streaming": True}


class Agent:
    """Keeps a conversation as such an agent does."""

    def __init__(self, client: anthropic.Anthropic) -> None:
        self._client = client
        self._num_requests = 0
        self.messages: list[Any] = []
        self.called: list[str] = []
        self.thoughts: list[str] = []
        self.num_cached: list[int] = []

    def _fields(self) -> dict[str, Any]:
        attribution = (
            f"x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch={self._num_requests:05x};"
        )
        system = [
            {"type": "text", "text": attribution},
            {"type": "text", "text": "You are a coding agent. " * 20, "cache_control": CACHED},
            {"type": "text", "text": "Be brief.", "cache_control": CACHED},
        ]
        return {"model": MODEL, "system": system, "messages": self._marked(), "tools": [tool(name) for name in KNOWN]}

    def _marked(self) -> list[Any]:
        """The messages; the last one's last block is marked, so that marks wander."""
        *before, last = self.messages
        if isinstance(last["content"], str):
            return self.messages
        *blocks, block = last["content"]
        return [*before, {**last, "content": [*blocks, {**block, "cache_control": CACHED}]}]

    def _ask(self) -> Any:
        self._num_requests += 1
        fields = self._fields()
        counted = self._client.messages.count_tokens(**fields, thinking={"type": "adaptive"})
        with self._client.beta.messages.stream(
            **fields,
            max_tokens=512,
            thinking={"type": "adaptive"},
            output_config={"effort": "high"},
            metadata={"user_id": "user_0_account__session_1"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            betas=["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        ) as stream:
            message = stream.get_final_message()
        usage = message.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
        self.num_cached.append(usage.cache_read_input_tokens or 0)
        return message

    def turn(self, question: str) -> str:
        """Answer calls until there is a text."""
        reminder = "<system-reminder>The list of things to do is empty.</system-reminder>"
        self.messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        for _ in range(6):
            message = self._ask()
            blocks = [block.to_dict() for block in message.content]
            self.messages.append({"role": "assistant", "content": blocks})
            self.thoughts += [block["thinking"] for block in blocks if block["type"] == "thinking"]
            calls = [block for block in blocks if block["type"] == "tool_use"]
            if not calls:
                assert message.stop_reason == "end_turn"
                self.messages.append({"role": "system", "content": reminder})
                return "".join(block["text"] for block in blocks if block["type"] == "text")
            assert message.stop_reason == "tool_use"
            self.called += [call["name"] for call in calls]
            results = [
                {"type": "tool_result", "tool_use_id": c["id"], "content": KNOWN[c["name"]][c["input"]["city"]]}
                for c in calls
            ]
            self.messages.append({"role": "user", "content": results})
        raise AssertionError(f"no end: {self.messages}")


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral"])
def test_two_turns(server_of: ServerOf, family: str) -> None:
    url = server_of(family)
    with anthropic.Anthropic(base_url=url, auth_token="none", max_retries=0, timeout=60) as client:
        agent = Agent(client)
        assert agent.turn(QUESTION) == ANSWER
        assert agent.called == ["get_weather", "get_time"]
        assert agent.turn(NEXT_QUESTION) == NEXT_ANSWER
        assert agent.called[2] == "get_weather"
        assert all(agent.num_cached[1:]), (
            "every prompt's beginning was there, though each has an attribution of its own"
        )
        if family == "qwen":
            assert agent.thoughts == [THOUGHT] * 2
