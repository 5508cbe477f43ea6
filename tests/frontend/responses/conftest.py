"""A server whose model thinks and calls tools, and OpenAI's own client for it."""

from collections.abc import Iterator

import openai
import pytest

from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.live_server import LiveServer, made_server
from tests.frontend.parsing.test_tools import SPECIAL, TEMPLATE


@pytest.fixture(scope="session")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("agents")
    with made_server(folder, chat_template=TEMPLATE, special_tokens=SPECIAL, max_model_len=4096) as live:
        yield live


@pytest.fixture
def agent(agent_server: LiveServer) -> LiveServer:
    agent_server.reset()
    return agent_server


@pytest.fixture
def agent_client(agent: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{agent.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def prompt_text(live: LiveServer) -> str:
    """The last prompt."""
    return live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))
