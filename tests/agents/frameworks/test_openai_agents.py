"""OpenAI's agents SDK, over chat completions and over responses."""

from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    AgentOutputSchema,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from tests.agents.report_type import Report
from tests.agents.script import ANSWER, AS_OBJECT, NEXT_ANSWER, NEXT_QUESTION, QUESTION, REPORT, TIME, WEATHER
from tests.agents.scripted_server import MODEL

set_tracing_disabled(True)
Api = Literal["chat", "responses"]


@pytest.fixture(params=["chat", "responses"])
async def model(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Model]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield (OpenAIChatCompletionsModel if request.param == "chat" else OpenAIResponsesModel)(MODEL, client)


class Story:
    """An agent with two tools, and what it called."""

    def __init__(self, model: Model, *, strict: bool = True, output_type: Any = None) -> None:
        self.called: list[str] = []

        def get_weather(city: str) -> str:
            """The weather of a city."""
            self.called.append("get_weather")
            return WEATHER[city]

        def get_time(city: str) -> str:
            """The time in a city."""
            self.called.append("get_time")
            return TIME[city]

        tools = [function_tool(function, strict_mode=strict) for function in (get_weather, get_time)]
        self.agent = Agent("guide", instructions="Be brief.", tools=tools, model=model, output_type=output_type)

    async def run(self, given: Any, *, stream: bool, **options: Any) -> Any:
        self.called.clear()
        if not stream:
            return await Runner.run(self.agent, given, **options)
        result = Runner.run_streamed(self.agent, given, **options)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert len(pieces) > 1
        return result


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
async def test_a_loop_of_two_turns(model: Model, stream: bool, strict: bool) -> None:
    story = Story(model, strict=strict)
    result = await story.run(QUESTION, stream=stream)
    assert (result.final_output, story.called) == (ANSWER, ["get_weather", "get_time"])
    more = [*result.to_input_list(), {"role": "user", "content": NEXT_QUESTION}]
    result = await story.run(more, stream=stream)
    assert (result.final_output, sorted(story.called)) == (NEXT_ANSWER, ["get_time", "get_weather"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
async def test_an_output_type(model: Model, stream: bool, strict: bool) -> None:
    story = Story(model, strict=strict, output_type=AgentOutputSchema(Report, strict_json_schema=strict))
    result = await story.run(f"{QUESTION} {AS_OBJECT}", stream=stream)
    assert (result.final_output, story.called) == (Report(**REPORT), ["get_weather", "get_time"])


async def test_a_stored_conversation_goes_on(model: Model) -> None:
    if not isinstance(model, OpenAIResponsesModel):
        pytest.skip("chat completions store nothing")
    story = Story(model)
    result = await story.run(QUESTION, stream=False, auto_previous_response_id=True)
    assert result.final_output == ANSWER
    result = await story.run(NEXT_QUESTION, stream=False, previous_response_id=result.last_response_id)
    assert result.final_output == NEXT_ANSWER
