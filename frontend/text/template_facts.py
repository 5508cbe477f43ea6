"""What a chat template shows, found by rendering: the tools, past calls and past reasoning of a small conversation.

From the texts `frontend/parsing/detection.py` finds the formats in which the model writes calls and reasoning.
"""

from typing import Any

import msgspec

from penstock.frontend.errors import ApiError
from penstock.frontend.text.call_style import Chat, Message
from penstock.frontend.text.chat_template import ChatTemplate

ARGUMENTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("look_at_water", {"river": "Sluice Brook", "depth": 7}),
    ("open_gate", {"gate": "weir", "depth": 3}),
)
"""The calls: names and arguments."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "integer" if key == "depth" else "string", "description": "A part."} for key in given
                },
                "required": list(given),
            },
        },
    }
    for name, given in ARGUMENTS
]
THOUGHT, ANSWER = "Penstocks hold water.", "Gates are shut."
_END_CHARS = 256
_USER: Message = {"role": "user", "content": "Is the gate open?"}


class Turn(msgspec.Struct, frozen=True):
    """An assistant's turn as the template writes it."""

    before: str
    """The end of the prompt before it."""
    text: str
    """What a model would write behind that prompt."""


class TemplateFacts(msgspec.Struct, frozen=True):
    """What a template shows of a small conversation."""

    shows_tools: bool = False
    calls: Turn | None = None
    """A turn with calls; None: the template shows none."""
    num_calls: int = 0
    """How many calls there are in that turn: one where the template shows no more in one message."""
    reasoning: Turn | None = None
    """A turn with reasoning and an answer; None: the template shows no past reasoning."""


def facts_of(template: ChatTemplate) -> TemplateFacts:
    """Render the small conversations. Rendering may take for ever, so it is done in the process of `child.py`."""
    shape = template.shape
    num_calls = 0 if shape.calls == "prompted" or shape.style.calls_as == "content" else 1 + (shape.calls == "together")
    calls = None
    while num_calls and calls is None:
        calling: Message = {"role": "assistant", "content": None, "tool_calls": _calls(num_calls)}
        calls = _turn(template, calling, ARGUMENTS[num_calls - 1][0])
        num_calls -= calls is None
    reasoned: Message = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    return TemplateFacts(shape.tools == "shown", calls, num_calls, _turn(template, reasoned, THOUGHT))


def _calls(count: int) -> list[dict[str, object]]:
    return [
        {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": given}}
        for index, (name, given) in enumerate(ARGUMENTS[:count])
    ]


def _turn(template: ChatTemplate, message: Message, word: str) -> Turn | None:
    """What the template writes of a message behind its prompt for an answer; None if it does not show the word."""
    written = _text(template, [_USER, message])
    prompt = _text(template, [_USER], asks=True)
    start = next((at for at, pair in enumerate(zip(prompt, written, strict=False)) if pair[0] != pair[1]), len(prompt))
    if start < len(prompt):  # the prompt goes on with a mark of which the turn has only the beginning
        mark = written.rfind("<", 0, start)
        start = mark if mark >= 0 and ">" not in written[mark:start] else start
    if word not in written[start:]:
        return None
    plain = _text(template, [_USER, {"role": "assistant", "content": ANSWER}])
    return Turn(written[:start][-_END_CHARS:], written[start:].removesuffix(plain.rpartition(ANSWER)[2]))


def _text(template: ChatTemplate, chat: Chat, *, asks: bool = False) -> str:
    try:
        return template.render(chat, tools=TOOLS, add_generation_prompt=asks)
    except ApiError:
        return ""
