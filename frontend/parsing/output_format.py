"""How the outputs of one chat request are to be read: decided once, from the model, the request and the prompt."""

from dataclasses import dataclass

from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.offered_tools import ValidTools
from penstock.frontend.parsing.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the outputs of one request are to be read."""

    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool = False  # the prompt ends inside reasoning
    is_reasoning_over: bool = False  # the prompt ends behind it
    include_reasoning: bool = True
    tools: ValidTools | None = None
    tool_format: ToolFormat | None = None  # None: there are no calls to be looked for
    is_call_open: bool = False  # the prompt ends with the mark that opens calls

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.reasoning is None and self.tool_format is None

    @property
    def marks(self) -> tuple[str, ...]:
        """What must stay visible even if the tokenizer spells it as special tokens."""
        reasoning = () if self.reasoning is None else self.reasoning.marks
        return reasoning if self.tool_format is None else (*reasoning, *self.tool_format.marks)
