"""From a sequence's text to a message: reasoning first, then content, then tool calls.

    text --ReasoningSplitter--> reasoning
                  `-----------> content --ToolCallParser--> content, calls
    text --ChannelParser--> all of them, for models that write in channels

How a request's outputs are read is decided once, from the model, the request and the prompt. Streams feed the parser
event by event; complete answers feed it everything at once, with the same result. Stop strings are looked for earlier,
in the raw text, which includes reasoning and calls.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from penstock.frontend.parsing.calls.block import Kinds
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.calls.parser import ToolCallParser
from penstock.frontend.parsing.channels import ChannelParser
from penstock.frontend.parsing.custom_input import CustomInputs, InputGrammar
from penstock.frontend.parsing.parts import CallArguments, CallInput, CallStart, Content, Part, Reasoning
from penstock.frontend.parsing.reasoning import ReasoningFormat, ReasoningSplitter
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS
from penstock.frontend.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ValidTools:
    """The tools that the model may call in this request."""

    definitions: list[
        dict[str, Any]
    ]  # as the client wrote them, custom ones as functions: what the chat template shows
    names: frozenset[str]
    parallel: bool
    tool_format: ToolFormat
    is_forced: bool = False
    """Whether the output must be calls, of the tools in `names`."""
    kinds: Kinds = field(default_factory=dict, compare=False)
    """What is known of the tools' schemas, which may be large: all calls of all sequences share it."""
    inputs: dict[str, InputGrammar] = field(default_factory=dict)
    """Custom tools, which are among the functions, and what each one's input must match."""

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
        """Whether there is a strict function: its arguments must match whenever it is called."""
        return any(tool["function"].get("strict") for tool in self.definitions)

    @property
    def binds_output(self) -> bool:
        """Whether the tools say what the model may write: calls are forced, or what they contain must match."""
        return self.is_forced or self.has_strict or any(grammar.syntax for grammar in self.inputs.values())


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the outputs of one request are to be read."""

    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool = False  # the prompt ends inside reasoning
    is_reasoning_over: bool = False  # the prompt ends after reasoning
    is_answer_open: bool = False  # the prompt ends with the mark that opens the answer
    include_reasoning: bool = True
    tools: ValidTools | None = None
    tool_format: ToolFormat | None = None  # None: no calls are looked for
    is_call_open: bool = False  # the prompt ends with the mark that opens calls

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that must stay visible even if the tokenizer has special tokens for them."""
        reasoning = () if self.reasoning is None else self.reasoning.marks
        return reasoning if self.tool_format is None else (*reasoning, *self.tool_format.marks)


PLAIN = OutputFormat()
"""The format in which all text is content."""


class MessageParser:
    """Turns one sequence's text into the parts of its message."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        self._splitter: ReasoningSplitter | None = None
        self._tools: ToolCallParser | ChannelParser | None = None
        reasoning, tools, tool_format = output_format.reasoning, output_format.tools, output_format.tool_format
        schemas = {} if tools is None else tools.schemas
        parallel = tools is None or tools.parallel
        self._inputs = CustomInputs(tools.inputs) if tools is not None and tools.inputs else None
        if reasoning is not None and reasoning.has_channels:
            self._tools = ChannelParser(tool_format or TOOL_FORMATS["harmony"], schemas, parallel=parallel)
            return
        if reasoning is not None:
            is_answer = output_format.is_answer_open
            self._splitter = ReasoningSplitter(reasoning, is_open=output_format.is_reasoning_open, is_answer=is_answer)
        if tool_format is not None:
            is_open = output_format.is_call_open
            kinds = None if tools is None else tools.kinds
            self._tools = ToolCallParser(tool_format, schemas, parallel=parallel, is_open=is_open, kinds=kinds)

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of text; return what is certain now."""
        if self._splitter is None:
            parts = self._without_reasoning([Content(text)] if text else [])
        else:
            parts = self._without_reasoning(self._splitter.feed(text))
        return parts if self._inputs is None else self._inputs.read(parts)

    def finish(self) -> list[Part]:
        """End the text; return what was held back."""
        parts = self._without_reasoning([] if self._splitter is None else self._splitter.finish())
        if self._tools is not None:
            parts += self._wanted(self._tools.finish())
        return parts if self._inputs is None else self._inputs.read(parts, is_final=True)

    def end(self, finish_reason: str) -> str:
        """The message's finish_reason: calls turn a stop into "tool_calls"."""
        has_calls = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason

    def _without_reasoning(self, parts: list[Part]) -> list[Part]:
        """Parts with calls found in their content, and without reasoning if it is not wanted."""
        if self._tools is None and self._format.include_reasoning:
            return parts
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                found += [part] if self._tools is None else self._wanted(self._tools.feed(part.text))
            elif self._format.include_reasoning:
                found.append(part)
        return found

    def _wanted(self, parts: list[Part]) -> list[Part]:
        """The parts, without reasoning if it is not wanted."""
        if self._format.include_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]


@dataclass(slots=True)
class ParsedCall:
    """One complete call."""

    call_id: str
    name: str
    arguments: str = ""  # of a custom tool: its input
    is_custom: bool = False

    def decoded(self) -> Any:
        """The arguments as a value; None if they are not JSON."""
        try:
            return msgspec.json.decode(self.arguments)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None


@dataclass(slots=True)
class ParsedMessage:
    """A complete message. `reasoning` is empty if there was none."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    finish_reason: str = ""


def parse_message(output_format: OutputFormat, text: str, finish_reason: str) -> ParsedMessage:
    """Parse a complete text."""
    parser = MessageParser(output_format)
    message = ParsedMessage()
    for part in parser.feed(text) + parser.finish():
        match part:
            case Reasoning():
                message.reasoning += part.text
            case Content():
                message.content += part.text
            case CallStart():
                message.calls.append(ParsedCall(part.call_id, part.name, is_custom=part.is_custom))
            case CallArguments() | CallInput():
                message.calls[part.index].arguments += part.text
    message.finish_reason = parser.end(finish_reason)
    return message


@cache
def takes_in_names(tool_format: ToolFormat, character: str) -> bool:
    """Whether a tool's name may have this character: whether the format's example with such a name is read back."""
    name = f"a{character}b"
    tool = {"type": "function", "function": {"name": name}}
    tools = ValidTools([tool], frozenset((name,)), True, tool_format)
    example = tool_format.example.replace("get_weather", name)
    found = parse_message(OutputFormat(tools=tools, tool_format=tool_format), example, "stop")
    return [call.name for call in found.calls] == [name]


class ReasoningCounter:
    """Counts the tokens of one sequence's reasoning, marks included; exact however they are grouped."""

    def __init__(self, output_format: OutputFormat, tokenizer: TextTokenizer) -> None:
        self._splitter: ReasoningSplitter | None = None
        if output_format.reasoning is not None:
            self._splitter = ReasoningSplitter(
                output_format.reasoning,
                is_open=output_format.is_reasoning_open,
                is_answer=output_format.is_answer_open,
            )
            self._detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        self._num_tokens = 0

    def feed(self, token_ids: list[int]) -> int:
        """Take the next tokens; return how many were reasoning so far."""
        splitter = self._splitter
        if splitter is not None:
            for token_id in token_ids:
                if splitter.is_over:
                    break
                splitter.feed(self._detokenizer.feed(token_id))
                self._num_tokens += 1
        return self._num_tokens if splitter is not None and splitter.has_begun else 0
