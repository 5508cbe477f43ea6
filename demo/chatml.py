"""The chat format of the demo model, as text and as the Jinja template that checkpoints carry."""

from typing import TypedDict

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class ChatMessage(TypedDict):
    """One message as the template sees it."""

    role: str
    content: str


def pieces(messages: list[ChatMessage]) -> list[tuple[str, bool]]:
    """The conversation as (text, is learned) pieces; only the assistant's words and end marks are learned."""
    found: list[tuple[str, bool]] = []
    for message in messages:
        found.append((f"{TURN_START}{message['role']}\n", False))
        if message["role"] == "assistant":
            found.append((f"{message['content']}{TURN_END}", True))
            found.append(("\n", False))
        else:
            found.append((f"{message['content']}{TURN_END}\n", False))
    return found
