"""A server whose model thinks and calls tools, and Anthropic's own client for it."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.live_server import LiveServer, made_server
from tests.frontend.parsing.test_tools import SPECIAL, TEMPLATE

SWITCHED = TEMPLATE.replace(
    "{% if open_thinking %}<think>\n{% endif %}",
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
)
"""As Qwen3's: the model thinks unless it is switched off."""


@pytest.fixture(scope="session")
def message_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("messages")
    with made_server(folder, chat_template=SWITCHED, special_tokens=SPECIAL, max_model_len=2048) as live:
        yield live


@pytest.fixture
def live(message_server: LiveServer) -> LiveServer:
    message_server.reset()
    return message_server


@pytest.fixture
def client(live: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    """A request with these fields."""
    return {"model": "test/model", "max_tokens": 256, "messages": [{"role": "user", "content": "Hello"}], **fields}


def prompt_text(live: LiveServer) -> str:
    """The last prompt."""
    return live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))
