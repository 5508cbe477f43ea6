"""LlamaIndex's agents."""

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike

from tests.agents.report_type import Report
from tests.agents.script import ANSWER, NEXT_ANSWER, NEXT_QUESTION, QUESTION, REPORT, TIME, WEATHER, by_tool
from tests.agents.scripted_server import MODEL


@pytest.fixture
def llm(url: str) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=32768,
        max_retries=0,
        timeout=60,
    )


class Story:
    """An agent with two tools, and what it called."""

    def __init__(self, llm: OpenAILike, **options: Any) -> None:
        self.called: list[str] = []

        def get_weather(city: str) -> str:
            """The weather of a city."""
            self.called.append("get_weather")
            return WEATHER[city]

        def get_time(city: str) -> str:
            """The time in a city."""
            self.called.append("get_time")
            return TIME[city]

        self.agent = FunctionAgent(
            tools=[get_weather, get_time], llm=llm, system_prompt="Be brief.", initial_tool_choice=None, **options
        )
        self.context = Context(self.agent)

    async def run(self, given: str, *, stream: bool) -> Any:
        self.called.clear()
        handler = self.agent.run(given, ctx=self.context)
        if stream:
            pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
            assert len(pieces) > 5
        return await handler


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
async def test_a_loop_of_two_turns(llm: OpenAILike, stream: bool, strict: bool) -> None:
    llm.strict = strict
    story = Story(llm, streaming=stream)
    result = await story.run(QUESTION, stream=stream)
    assert (str(result), story.called) == (ANSWER, ["get_weather", "get_time"])
    result = await story.run(NEXT_QUESTION, stream=stream)
    assert (str(result), sorted(story.called)) == (NEXT_ANSWER, ["get_time", "get_weather"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_output_type(llm: OpenAILike, stream: bool) -> None:
    story = Story(llm, streaming=stream, output_cls=Report)
    result = await story.run(QUESTION, stream=stream)
    assert result.get_pydantic_model(Report) == Report(**REPORT)
    assert story.called == ["get_weather", "get_time"]


@pytest.mark.parametrize("forms", [False, True], ids=["by tool", "by form"])
def test_structured_output_without_an_agent(llm: OpenAILike, forms: bool) -> None:
    llm.should_use_structured_outputs = forms
    how = "" if forms else by_tool("Report")
    made = llm.as_structured_llm(Report).chat([ChatMessage(f"Describe Ulm. {how}")])
    assert made.raw == Report(**REPORT)
