"""instructor in all its modes for OpenAI's API."""

from collections.abc import Iterable, Iterator
from typing import Any

import instructor
import openai
import pytest

from tests.agents.report_type import Report
from tests.agents.script import REPORT, by_tool
from tests.agents.scripted_server import MODEL

Mode = instructor.Mode
BY_TOOL = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS]
AS_TEXT = [Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.JSON_O1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def messages(mode: Any, tool: str = "Report") -> list[dict[str, Any]]:
    how = "" if mode in AS_TEXT else by_tool(tool)
    return [{"role": "user", "content": f"Describe Ulm. {how}"}]


@pytest.mark.parametrize("mode", [*BY_TOOL, *AS_TEXT], ids=lambda mode: mode.value)
def test_an_object(client: openai.OpenAI, mode: Any) -> None:
    wrapped: Any = instructor.from_openai(client, mode=mode)
    made = wrapped.chat.completions.create(model=MODEL, messages=messages(mode), response_model=Report, max_retries=0)
    assert made.model_dump() == REPORT


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON], ids=str)
def test_a_growing_object(client: openai.OpenAI, mode: Any) -> None:
    wrapped: Any = instructor.from_openai(client, mode=mode)
    grown = list(
        wrapped.chat.completions.create_partial(
            model=MODEL, messages=messages(mode, "PartialReport"), response_model=Report, max_retries=0
        )
    )
    assert len(grown) > 3
    assert grown[-1].model_dump() == REPORT


def test_several_calls(client: openai.OpenAI) -> None:
    wrapped: Any = instructor.from_openai(client, mode=Mode.PARALLEL_TOOLS)
    made = wrapped.chat.completions.create(
        model=MODEL, messages=messages(Mode.PARALLEL_TOOLS), response_model=Iterable[Report], max_retries=0
    )
    assert [each.model_dump() for each in made] == [REPORT]
