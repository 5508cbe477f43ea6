"""The text side of the served model: its names, tokenizer and templates, read once from the checkpoint."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.config import Config, FrontendOptions
from penstock.frontend.parsing.calls.format import ToolFormat
from penstock.frontend.parsing.detection import find_formats
from penstock.frontend.parsing.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format_of
from penstock.frontend.parsing.tool_formats.registry import TOOL_FORMATS, tool_format_of
from penstock.frontend.text.chat_template import ChatTemplate, load_chat_template
from penstock.frontend.text.infill import Infill, infill_of
from penstock.frontend.text.template_facts import TemplateFacts
from penstock.frontend.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.frontend.validation.common import SamplingDefaults
from penstock.models.classes import class_names
from penstock.models.description.model_config import ModelConfig
from penstock.models.embeddings import Embeddings, embeddings_of
from penstock.models.files.source import Checkpoint, eos_token_ids
from penstock.models.finding.registry import open_model, served_model_names
from penstock.models.parsing.json_fields import JsonFields

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How transformers ends the names of architectures with a matrix of logits."""


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
    infill: Infill | None = None  # None: the model cannot fill in the middle
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    embeddings: Embeddings = field(default_factory=Embeddings)
    draws_tokens: bool = True  # False: the model turns texts into vectors or classes only
    classes: tuple[str, ...] = ()  # the names of a classifier's classes
    digest: str = ""  # of everything that turns requests into tokens, and tokens into text
    hides_calls: bool = False  # the template shows tools, but no past calls

    def with_facts(self, facts: TemplateFacts, options: FrontendOptions) -> "TextModel":
        """The model, with the formats that its chat template was seen to use."""
        source = "" if self.template is None else self.template.source
        tool_format = self.tool_format
        found, found_reasoning = find_formats(source, facts)
        if options.tool_call_parser == "auto":
            tool_format = found
        reasoning_format = self.reasoning_format
        if options.reasoning_parser == "auto":
            reasoning_format = found_reasoning
        return replace(
            self,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            hides_calls=facts.shows_tools and facts.calls is None,
        )


def load_text_model(config: Config) -> TextModel:
    """Read tokenizer, chat template and generation defaults of the checkpoint.

    Raises:
        ConfigError: if one of them cannot be used.
    """
    checkpoint = open_model(config)
    tokenizer = load_tokenizer(checkpoint)
    eos = eos_token_ids(checkpoint)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    template = load_chat_template(checkpoint, config.frontend.chat_template, tokenizer.special_tokens)
    source = "" if template is None else template.source
    described = _described(config, checkpoint)
    num_classes = 0 if described is None else described.num_classes
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
        infill=infill_of(tokenizer, checkpoint.tokenizer_config),
        tokenizer_config=checkpoint.tokenizer_config,
        embeddings=embeddings_of(checkpoint, config.frontend, described),
        draws_tokens=described is None or described.draws_tokens,
        classes=class_names(checkpoint, num_classes),
        digest=_digest(config, checkpoint, source),
    )


def _described(config: Config, checkpoint: Checkpoint) -> ModelConfig | None:
    """The model's description; None for a plain language model, or without an architecture.

    What config.json says is enough, but for embedding models: these may be stored without a matrix of logits. All
    families are imported for it, which costs a frontend time and memory that one of a plain language model saves.
    """
    named, is_for_embeddings = checkpoint.config.get("architectures") or [""], bool(checkpoint.embedding_modules())
    if not named[0] or (str(named[0]).endswith(_GENERATING) and not is_for_embeddings):
        return None
    from penstock.models.described import model_config_of

    has_weights = config.worker.load_format != "dummy" and is_for_embeddings
    return model_config_of(checkpoint, config.model.model_impl, with_weights=has_weights)


def _digest(config: Config, checkpoint: Checkpoint, template: str) -> str:
    read = {
        "template": template,
        "tokenizer": checkpoint.tokenizer_config,
        "generation": checkpoint.generation_config,
        "parse_special_tokens": config.frontend.parse_special_tokens,
    }
    digest = hashlib.sha256(checkpoint.tokenizer())
    digest.update(msgspec.json.encode(read, order="sorted"))
    return digest.hexdigest()[:16]


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """Sampling defaults from generation_config.json; absent fields get neutral values."""
    found = JsonFields("generation_config.json", checkpoint.generation_config)
    neutral = SamplingDefaults()
    names = ("temperature", "top_p", "min_p", "repetition_penalty")
    values = {name: found.number(name, getattr(neutral, name)) for name in names}
    return SamplingDefaults(**values, top_k=max(found.whole("top_k", 0, least=-1), 0))
