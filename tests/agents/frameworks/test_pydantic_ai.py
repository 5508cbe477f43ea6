"""pydantic-ai, over chat completions and over responses, with its ways to get an object."""

from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

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
def model(url: str, request: pytest.FixtureRequest) -> Model:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return (OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel)(MODEL, provider=provider)


class Story:
    """An agent with two tools, and what it called."""

    def __init__(self, model: Model, output_type: Any = str, strict: bool | None = None) -> None:
        self.called: list[str] = []

        def get_weather(city: str) -> str:
            """The weather of a city."""
            self.called.append("get_weather")
            return WEATHER[city]

        def get_time(city: str) -> str:
            """The time in a city."""
            self.called.append("get_time")
            return TIME[city]

        tools = [Tool(function, strict=strict) for function in (get_weather, get_time)]
        self.agent: Agent[None, Any] = Agent(
            model, instructions="Be brief.", tools=tools, output_type=output_type, retries=0
        )

    async def run(self, given: str, *, stream: bool, **options: Any) -> tuple[Any, Any]:
        """The answer and the conversation."""
        self.called.clear()
        if not stream:
            result = await self.agent.run(given, **options)
            return result.output, result.all_messages()
        async with self.agent.run_stream(given, **options) as streamed:
            pieces = [piece async for piece in streamed.stream_output(debounce_by=None)]
            assert len(pieces) > 1
            return await streamed.get_output(), streamed.all_messages()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [None, True], ids=["", "strict"])
async def test_a_loop_of_two_turns(model: Model, stream: bool, strict: bool | None) -> None:
    story = Story(model, strict=strict)
    answer, messages = await story.run(QUESTION, stream=stream)
    assert (answer, story.called) == (ANSWER, ["get_weather", "get_time"])
    answer, _ = await story.run(NEXT_QUESTION, stream=stream, message_history=messages)
    assert (answer, sorted(story.called)) == (NEXT_ANSWER, ["get_time", "get_weather"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [None, True], ids=["", "strict"])
@pytest.mark.parametrize("way", ["tool", "native", "prompted"])
async def test_an_output_type(model: Model, stream: bool, strict: bool | None, way: str) -> None:
    output: dict[str, Any] = {
        "tool": ToolOutput(Report, name="final_result", strict=strict),
        "native": NativeOutput(Report, strict=strict),
        "prompted": PromptedOutput(Report),
    }
    story = Story(model, output[way], strict)
    how = by_tool("final_result") if way == "tool" else AS_OBJECT
    answer, _ = await story.run(f"{QUESTION} {how}", stream=stream)
    assert (answer, story.called) == (Report(**REPORT), ["get_weather", "get_time"])
