"""What a chat template renders."""

from dataclasses import dataclass
from typing import Any

from penstock.frontend.text.template_calls import Chat


@dataclass(frozen=True, slots=True)
class ValidConversation:
    """Messages that a chat template can be given, and how to render them."""

    messages: Chat
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    warnings: tuple[str, ...] = ()  # for the client; see `exchange.py`
