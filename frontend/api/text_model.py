"""What the frontend knows of the served model: its names and its text tools, read once from the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.checkpoint.json_fields import JsonFields
from penstock.core.checkpoint.registry import open_model, served_model_names
from penstock.core.checkpoint.source import Checkpoint, eos_token_ids
from penstock.core.config import Config
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.output_format import OutputFormat
from penstock.frontend.parsing.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_of
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS, tool_format_of
from penstock.frontend.text.chat_template import ChatTemplate, load_chat_template
from penstock.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.frontend.validation.chat import ValidChat
from penstock.frontend.validation.common import SamplingDefaults

_NUM_LAST_TOKENS = 16
"""Enough of a prompt's end to see whether the template has opened reasoning."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """Names, tokenizer, chat template and generation defaults of one model."""

    names: tuple[str, ...]
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    eos_token_ids: tuple[int, ...]
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)

    def output_format(self, valid: ValidChat, prompt: list[int]) -> OutputFormat:
        """How what the model will write behind this prompt is to be read."""
        reasoning, tools = self.reasoning_format, valid.tools
        tool_format = self.tool_format if tools is None else tools.tool_format
        is_prompted = tool_format is not None and tool_format.is_opened_by_prompt
        if tools is None and not is_prompted:
            tool_format = None
        prompt_end = final = ""
        if reasoning is not None or is_prompted:
            conversation = valid.conversation
            continued = conversation.messages[-1].get("content") if conversation.continue_final_message else ""
            final = continued if isinstance(continued, str) else ""
            prompt_end = self.tokenizer.decode(prompt[-_NUM_LAST_TOKENS:])
        return OutputFormat(
            reasoning=reasoning,
            is_reasoning_open=reasoning is not None and reasoning.is_opened_by(prompt_end, final),
            is_reasoning_over=reasoning is not None and reasoning.is_closed_by(prompt_end, final),
            include_reasoning=valid.include_reasoning,
            tools=tools,
            tool_format=tool_format,
            is_call_open=tool_format is not None and is_prompted and prompt_end.endswith(tool_format.starts[0]),
        )


def load_text_model(config: Config) -> TextModel:
    """Read tokenizer, chat template and generation defaults of the checkpoint.

    Raises:
        ConfigError: in one clear sentence, if one of them cannot be used.
    """
    checkpoint = open_model(config)
    tokenizer = load_tokenizer(checkpoint)
    eos = eos_token_ids(checkpoint)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    template = load_chat_template(checkpoint, config.frontend.chat_template, tokenizer.special_tokens)
    source = "" if template is None else template.source
    tool_parser, reasoning_parser = config.frontend.tool_call_parser, config.frontend.reasoning_parser
    return TextModel(
        names=served_model_names(config),
        tokenizer=tokenizer,
        template=template,
        defaults=_sampling_defaults(checkpoint),
        eos_token_ids=eos,
        tool_format=tool_format_of(source) if tool_parser == "auto" else TOOL_FORMATS.get(tool_parser),
        reasoning_format=(
            reasoning_format_of(source) if reasoning_parser == "auto" else REASONING_FORMATS.get(reasoning_parser)
        ),
        tokenizer_config=checkpoint.tokenizer_config,
    )


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """generation_config.json's say on sampling; absent fields keep the neutral values."""
    found = JsonFields("generation_config.json", checkpoint.generation_config)
    neutral = SamplingDefaults()
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    values = {name: found.number(name, getattr(neutral, name)) for name in names}
    return SamplingDefaults(**values, top_k=max(found.whole("top_k", 0, least=-1), 0))
