"""How the outputs of one chat request are to be read: decided once, from the model, the request and the prompt."""

from penstock.frontend.api.service import TextModel
from penstock.frontend.parsing.output_format import OutputFormat
from penstock.frontend.validation.chat import ValidChat

_NUM_LAST_TOKENS = 16
"""Enough of a prompt's end to see whether the template has opened reasoning."""


def output_format_for(model: TextModel, valid: ValidChat, prompt: list[int]) -> OutputFormat:
    """The format of what the model will write behind this prompt."""
    reasoning, tools = model.reasoning_format, valid.tools
    tool_format = model.tool_format if tools is None else tools.tool_format
    is_prompted = tool_format is not None and tool_format.is_opened_by_prompt
    if tools is None and not is_prompted:
        tool_format = None
    prompt_end = final = ""
    if reasoning is not None or is_prompted:
        conversation = valid.conversation
        continued = conversation.messages[-1].get("content") if conversation.continue_final_message else ""
        final = continued if isinstance(continued, str) else ""
        prompt_end = model.tokenizer.decode(prompt[-_NUM_LAST_TOKENS:])
    return OutputFormat(
        reasoning=reasoning,
        is_reasoning_open=reasoning is not None and reasoning.is_opened_by(prompt_end, final),
        is_reasoning_over=reasoning is not None and reasoning.is_closed_by(prompt_end, final),
        include_reasoning=valid.include_reasoning,
        tools=tools,
        tool_format=tool_format,
        is_call_open=tool_format is not None and is_prompted and prompt_end.endswith(tool_format.starts[0]),
    )
