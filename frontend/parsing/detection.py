"""Finds the formats in which a model writes calls and reasoning, from what its chat template shows.

A template's own rendering of past calls is read by the formats: the one that gives the same calls back is the model's.
Those that the template's source names are tried first. Where no calls are shown, its source alone decides. A format
that cannot read what the template writes is never taken, whatever marks it has in common.
"""

import re
from dataclasses import replace

from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.parser import OutputFormat, ParsedMessage, ValidTools, parse_message
from penstock.frontend.parsing.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_of
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS, tool_format_of
from penstock.frontend.text.template_facts import ANSWER, ARGUMENTS, THOUGHT, TOOLS, TemplateFacts, Turn

_GENERIC = TOOL_FORMATS["generic"]
_LENIENT = ("generic", "gemma3", "pythonic", "llama3_json")
"""Formats that read much which is not theirs: taken only if the source names them."""

_ENDS = re.compile(r"(\s|<[|｜][^<>]*>|<[A-Z_0-9]+>)*")
"""Tokens that end a turn, which are never in a model's output."""


def find_formats(source: str, facts: TemplateFacts) -> tuple[ToolFormat, ReasoningFormat | None]:
    """The formats of calls (the generic one if it is none that is known) and of reasoning (None: there is none)."""
    reasoning = _reasoning_format(source, facts)
    if facts.calls is None:
        return tool_format_of(source) if facts.shows_tools else _GENERIC, reasoning
    taught = [each for each in TOOL_FORMATS.values() if each is not _GENERIC and each.is_taught_by(source)]
    others = [tool_format for name, tool_format in TOOL_FORMATS.items() if name not in _LENIENT]
    text = facts.calls.text
    readers = [(reads_calls(each, reasoning, facts), each) for each in (*taught, *others)]
    # Of several that read everything, the one whose first mark is there: that one also writes it.
    (is_read, _), best = max(readers, key=lambda reader: (*reader[0], reader[1].starts[0] in text))
    return best if is_read else _GENERIC, reasoning


def read_turn(turn: Turn, tool_format: ToolFormat, reasoning: ReasoningFormat | None) -> ParsedMessage:
    """What such an output means to a client that has offered the tools."""
    return parse_message(output_format(turn, tool_format, reasoning), turn.text, "stop")


def output_format(turn: Turn, tool_format: ToolFormat, reasoning: ReasoningFormat | None) -> OutputFormat:
    """How an output behind the turn's prompt is read."""
    return OutputFormat(
        reasoning=REASONING_FORMATS["harmony"] if tool_format.name == "harmony" else reasoning,
        is_reasoning_open=reasoning is not None and reasoning.is_opened_by(turn.before),
        is_reasoning_over=reasoning is not None and reasoning.is_closed_by(turn.before),
        is_answer_open=reasoning is not None and reasoning.is_answered_by(turn.before),
        tools=ValidTools(TOOLS, frozenset(name for name, _ in ARGUMENTS), True, tool_format),
        tool_format=tool_format,
        is_call_open=tool_format.is_opened_by_prompt and turn.before.endswith(tool_format.starts[0]),
    )


def reads_calls(tool_format: ToolFormat, reasoning: ReasoningFormat | None, facts: TemplateFacts) -> tuple[bool, bool]:
    """Whether the format reads the calls that the template writes, and whether no text is left beside them."""
    has_channels = reasoning is not None and reasoning.has_channels  # which are read by one format alone
    if facts.calls is None or (has_channels and tool_format.name != "harmony"):
        return False, False
    found = read_turn(facts.calls, tool_format, reasoning)
    calls = [(call.name, call.decoded()) for call in found.calls]
    is_read = calls == list(ARGUMENTS[: facts.num_calls])
    return is_read, is_read and _ENDS.fullmatch(found.content) is not None


def _reasoning_format(source: str, facts: TemplateFacts) -> ReasoningFormat | None:
    taught = reasoning_format_of(source)
    if facts.reasoning is None:
        return taught
    formats = (*((taught,) if taught is not None else ()), *REASONING_FORMATS.values())
    return next((each for each in formats if reads_reasoning(each, facts)), taught)


def reads_reasoning(reasoning: ReasoningFormat, facts: TemplateFacts) -> bool:
    """Whether the format reads the reasoning that the template writes."""
    if facts.reasoning is None:
        return False
    form = output_format(facts.reasoning, _GENERIC, reasoning)
    for is_open in (form.is_reasoning_open, True):  # some templates show past reasoning without its first mark
        found = parse_message(replace(form, is_reasoning_open=is_open), facts.reasoning.text, "stop")
        if found.reasoning == THOUGHT and found.content.startswith(ANSWER):
            return True
    return False
