"""How the outputs of one chat request are to be read: decided once, from the model, the request and the prompt."""

from dataclasses import dataclass

from penstock.frontend.reasoning import ReasoningFormat
from penstock.frontend.service import TextModel
from penstock.frontend.validate_chat import ValidChat
from penstock.frontend.validate_tools import ValidTools

_NUM_LAST_TOKENS = 16
"""Enough of a prompt's end to see whether the template has opened reasoning."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the outputs of one request are to be read."""

    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool = False  # the prompt ends inside reasoning
    include_reasoning: bool = True
    tools: ValidTools | None = None

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.reasoning is None and self.tools is None

    @property
    def marks(self) -> tuple[str, ...]:
        """What must stay visible even if the tokenizer spells it as special tokens."""
        reasoning = () if self.reasoning is None else self.reasoning.marks
        return reasoning if self.tools is None else (*reasoning, *self.tools.tool_format.marks)


def output_format_for(model: TextModel, valid: ValidChat, prompt: list[int]) -> OutputFormat:
    """The format of what the model will write behind this prompt."""
    if valid.common.grammar is not None and valid.tools is None:
        return OutputFormat()  # what matches a grammar is the content, all of it
    if valid.tools is not None and valid.tools.is_forced:
        return OutputFormat(tools=valid.tools)  # calls from the first token on
    reasoning = model.reasoning_format
    is_open = False
    if reasoning is not None:
        conversation = valid.conversation
        continued = conversation.messages[-1].get("content") if conversation.continue_final_message else ""
        prompt_end = model.tokenizer.decode(prompt[-_NUM_LAST_TOKENS:])
        is_open = reasoning.is_opened_by(prompt_end, continued if isinstance(continued, str) else "")
    return OutputFormat(reasoning, is_open, valid.include_reasoning, valid.tools)
