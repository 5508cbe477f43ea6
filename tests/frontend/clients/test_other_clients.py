"""Clients built on OpenAI's API work unchanged: langchain-openai, litellm and instructor."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.frontend.live_server import LiveServer, made_server
from tests.frontend.parsing.test_tools import CALL, TEMPLATE, THOUGHT, WEATHER

# What these libraries warn of, on import and when they end, is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = "Water runs down the pipe."


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with made_server(tmp_path_factory.mktemp("clients"), chat_template=TEMPLATE) as live:
        yield live


@pytest.fixture
def live(tool_server: LiveServer) -> LiveServer:
    tool_server.reset()
    return tool_server


def test_langchain(live: LiveServer) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(model="test/model", base_url=f"{live.url}/v1", api_key="none", max_retries=0)  # type: ignore[arg-type]
    live.says(TEXT)
    answer = chat.invoke([SystemMessage("Be kind."), HumanMessage("Hello")])
    assert answer.content == TEXT
    assert answer.usage_metadata["output_tokens"] > 5
    assert "".join(chunk.content for chunk in chat.stream("Hello")) == TEXT
    live.says(CALL)
    with_tools = chat.bind_tools([WEATHER])
    question = HumanMessage("Weather?")
    answer = with_tools.invoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Tromsø"})
    streamed = None
    for chunk in with_tools.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [("get_weather", {"city": "Tromsø"})]
    live.says("Cold.")
    assert with_tools.invoke([question, answer, ToolMessage("-3", tool_call_id=call["id"])]).content == "Cold."


def test_langchain_with_responses(live: LiveServer) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        model="test/model",
        base_url=f"{live.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        use_responses_api=True,
    )
    live.says(THOUGHT + TEXT)
    assert chat.invoke("Hello").text == TEXT
    live.says(CALL)
    [call] = chat.bind_tools([WEATHER]).invoke("Weather?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Tromsø"})


def test_litellm(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up on the network
    import litellm

    where: dict[str, Any] = {"model": "openai/test/model", "api_base": f"{live.url}/v1", "api_key": "none"}
    messages = [{"role": "user", "content": "Hello"}]
    live.says(THOUGHT + TEXT)
    answer: Any = litellm.completion(messages=messages, **where)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.reasoning_content == "Let me see."
    chunks: list[Any] = list(litellm.completion(messages=messages, stream=True, **where))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    live.says(CALL)
    answer = litellm.completion(messages=messages, tools=[WEATHER], **where)
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Tromsø"})
    assert answer.choices[0].finish_reason == "tool_calls"
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(messages=messages, temperature=-1, **where)


class Weather(pydantic.BaseModel):
    """What the tool call and the JSON below say."""

    city: str


def test_instructor(live: LiveServer) -> None:
    import instructor

    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        call = CALL.replace("get_weather", "Weather")
        for mode, text in (
            (instructor.Mode.TOOLS, call),
            (instructor.Mode.JSON, '{"city": "Troms\u00f8"}'),
            (instructor.Mode.JSON_SCHEMA, '{"city": "Troms\u00f8"}'),
        ):
            live.says(text)
            wrapped: Any = instructor.from_openai(client, mode=mode)
            made = wrapped.chat.completions.create(
                model="test/model", messages=messages, response_model=Weather, max_retries=0
            )
            assert isinstance(made, Weather), mode
            assert made.city == "Troms\u00f8"
