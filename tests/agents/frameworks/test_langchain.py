"""LangChain's agents (which are LangGraph's graphs), over chat completions and over responses."""

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from tests.agents.report_type import Report
from tests.agents.script import (
    ANSWER,
    AS_OBJECT,
    NEXT_ANSWER,
    NEXT_QUESTION,
    QUESTION,
    REPORT,
    TIME,
    WEATHER,
    by_tool,
)
from tests.agents.scripted_server import MODEL


@pytest.fixture(params=["chat", "responses"])
def chat(url: str, request: pytest.FixtureRequest) -> ChatOpenAI:
    options: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(**options, use_responses_api=request.param == "responses", timeout=60)


class Story:
    """An agent with two tools and a memory, and what it called."""

    def __init__(self, chat: ChatOpenAI, response_format: Any = None, strict: bool | None = None) -> None:
        self.called: list[str] = []

        @tool
        def get_weather(city: str) -> str:
            """The weather of a city."""
            self.called.append("get_weather")
            return WEATHER[city]

        @tool
        def get_time(city: str) -> str:
            """The time in a city."""
            self.called.append("get_time")
            return TIME[city]

        tools: list[Any] = [get_weather, get_time]
        if strict is not None:
            for each in tools:
                each.extras = {"strict": strict}
        self.agent: Any = create_agent(
            chat, tools, system_prompt="Be brief.", response_format=response_format, checkpointer=InMemorySaver()
        )

    def run(self, given: str, *, stream: bool) -> Any:
        """The state in the end."""
        self.called.clear()
        config = {"configurable": {"thread_id": "1"}}
        state = {"messages": [{"role": "user", "content": given}]}
        if not stream:
            return self.agent.invoke(state, config)
        pieces = [piece for piece, _ in self.agent.stream(state, config, stream_mode="messages")]
        assert len(pieces) > 5
        return self.agent.get_state(config).values


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [None, True], ids=["", "strict"])
def test_a_loop_of_two_turns(chat: ChatOpenAI, stream: bool, strict: bool | None) -> None:
    story = Story(chat, strict=strict)
    assert story.run(QUESTION, stream=stream)["messages"][-1].text == ANSWER
    assert story.called == ["get_weather", "get_time"]
    assert story.run(NEXT_QUESTION, stream=stream)["messages"][-1].text == NEXT_ANSWER
    assert sorted(story.called) == ["get_time", "get_weather"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("way", ["tool", "provider", "provider strict"])
def test_an_output_type(chat: ChatOpenAI, stream: bool, way: str) -> None:
    how = by_tool("Report") if way == "tool" else AS_OBJECT
    form: Any = ToolStrategy(Report) if way == "tool" else ProviderStrategy(Report, strict=way.endswith("strict"))
    story = Story(chat, form)
    assert story.run(f"{QUESTION} {how}", stream=stream)["structured_response"] == Report(**REPORT)
    assert story.called == ["get_weather", "get_time"]


@pytest.mark.parametrize("method", ["function_calling", "json_mode", "json_schema"])
def test_structured_output_without_an_agent(chat: ChatOpenAI, method: Any) -> None:
    how = by_tool("Report") if method == "function_calling" else ""
    made = chat.with_structured_output(Report, method=method).invoke(f"Describe Ulm. As JSON. {how}")
    assert made == Report(**REPORT)
