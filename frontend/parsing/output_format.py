"""How the outputs of one chat request are to be read: decided once, from the model, the request and the prompt."""

from dataclasses import dataclass
from typing import Any

from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.reasoning import ReasoningFormat


@dataclass(frozen=True, slots=True)
class ValidTools:
    """The tools that the model may call in this request."""

    definitions: list[dict[str, Any]]  # as the client wrote them: what the chat template shows
    names: frozenset[str]
    parallel: bool
    tool_format: ToolFormat
    is_forced: bool = False
    """The output must be calls, of the tools in `names`."""

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions of the tools in `names`."""
        return [tool["function"] for tool in self.definitions if tool["function"]["name"] in self.names]

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments."""
        return {function["name"]: function.get("parameters") or {} for function in self.functions}

    @property
    def has_strict(self) -> bool:
        """Some tool's arguments must match their schema whenever it is called."""
        return any(tool["function"].get("strict") for tool in self.definitions)


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
