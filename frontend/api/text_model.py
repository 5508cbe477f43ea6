"""The text side of the served model: its names, tokenizer and templates, read once from the checkpoint."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import Config, ConfigError, FrontendOptions
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
from penstock.models.files.texts import WithTexts, has_texts
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

    @property
    def template_source(self) -> str:
        """Of the chat template; empty: there is none."""
        return "" if self.template is None else self.template.source

    def with_facts(self, facts: TemplateFacts, options: FrontendOptions) -> "TextModel":
        """The model, with the formats that its chat template was seen to use."""
        source = self.template_source
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
    return _text_model(config, open_model(config), config.frontend.chat_template, served_model_names(config))


def load_variant_texts(config: Config, model: TextModel, folder: Path) -> tuple[TextModel, str]:
    """The texts of an adapter, and the file of `--chat-template` if that is for it, too.

    Returns the model's own if the adapter has no other tokenizer or template. That option replaces the checkpoint's
    template, and no other.

    Raises:
        ConfigError: if one of the texts cannot be used with this model.
    """
    override = config.frontend.chat_template
    if not has_texts(folder):
        return model, override
    checkpoint = open_model(config)
    own = WithTexts(checkpoint, folder)
    template_file = override if own.chat_template() == checkpoint.chat_template() else ""
    found = _text_model(config, own, template_file, model.names)
    if found.tokenizer.identity == model.tokenizer.identity:
        found.tokenizer.close()
        found = replace(found, tokenizer=model.tokenizer)
        if found.template_source == model.template_source:
            return model, override
    else:
        _check_tokens(found.tokenizer, model.tokenizer, checkpoint.config)
    end = found.tokenizer.eos_token_id
    ends = found.eos_token_ids if end is None else tuple(dict.fromkeys((*found.eos_token_ids, end)))
    return replace(found, eos_token_ids=ends), template_file


def _check_tokens(own: TextTokenizer, base: TextTokenizer, config: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that is another model's, or has tokens that this one has no embeddings for."""
    numbers = base.vocabulary
    for token, number in own.vocabulary.items():
        if numbers.get(token, number) != number:
            raise ConfigError(
                f"its tokenizer.json is another model's: the token {token[:64]!r} has the number {number} there, and "
                f"{numbers[token]} in the model's"
            )
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, Mapping) else None)
    added = sorted((number, token) for token, number in own.vocabulary.items() if token not in numbers)
    if isinstance(size, int) and added and added[-1][0] >= size:
        raise ConfigError(
            f"it adds the token {added[-1][1][:64]!r} with the number {added[-1][0]}, for which the model has no "
            f"embedding (vocab_size is {size})"
        )


def _text_model(config: Config, checkpoint: Checkpoint, template_file: str, names: tuple[str, ...]) -> TextModel:
    tokenizer = load_tokenizer(checkpoint)
    eos = eos_token_ids(checkpoint)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    template = load_chat_template(checkpoint, template_file, tokenizer.special_tokens)
    source = "" if template is None else template.source
    described = _described(config, checkpoint)
    num_classes = 0 if described is None else described.num_classes
    tool_parser, reasoning_parser = config.frontend.tool_call_parser, config.frontend.reasoning_parser
    return TextModel(
        names=names,
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
