"""Requests that are large and allowed: many stop strings, prompts, tools, messages, words."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontend.http_client import HELLO, chat, complete
from tests.frontend.live_server import LiveServer, made_server


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With room for long prompts; the template shows the tools' names."""
    template = "<tool_call>{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ messages | length }}"
    with made_server(tmp_path_factory.mktemp("large"), chat_template=template, max_model_len=16_384) as live:
        yield live


def test_many_stop_strings(live: LiveServer) -> None:
    live.says("Water runs down the pipe")
    stops = [f"never {number}" for number in range(1000)] + [" down"]
    choice = complete(live, stop=stops, max_tokens=100).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("Water runs", " down")
    choice = chat(live, stop=["x" * 16_000, "runs"]).json()["choices"][0]
    assert choice["message"]["content"] == "Water "


def test_many_prompts(live: LiveServer) -> None:
    answer = complete(live, ["Hi"] * 300, max_tokens=1).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(300))


def test_many_bad_words(live: LiveServer) -> None:
    words = [f"word {number}" for number in range(512)]
    assert complete(live, bad_words=words).status == 200
    assert len(live.scheduler.added[-1].sampling.bad_words) >= 512


def test_many_tools(large: LiveServer) -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": f"server/tool_{number}", "description": "d" * 40}}
        for number in range(300)
    ]
    assert chat(large, tools=tools).status == 200
    long = {"type": "function", "function": {"name": "x" * 128, "description": "d" * 40_000}}
    assert chat(large, tools=[long]).status == 200


def test_many_messages(large: LiveServer) -> None:
    messages = [{"role": ("user", "assistant")[number % 2], "content": "Hi"} for number in range(3000)]
    assert chat(large, messages=[*messages, *HELLO]).status == 200
