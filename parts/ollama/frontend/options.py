"""Turns Ollama's options, format and levels of thinking into the fields of a chat request."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.api.text_model import TextModel
from penstock.frontend.errors import InvalidParameter, ModelNotFound, UnsupportedParameter
from penstock.frontend.image_source import ImageLimits
from penstock.frontend.schema import DrawFields, SamplingRequest
from penstock.frontend.validation.chat import thinking_switch
from penstock.frontend.validation.common import Rules, ValidRequest
from penstock.frontend.validation.foreign_fields import as_whole, take_foreign_fields
from penstock.frontend.validation.grammar import GrammarSource, check_ending, schema_source
from penstock.parts.ollama.frontend.schema import OllamaRequest

LATEST = ":latest"
THINKING_LEVELS = ("low", "medium", "high", "max")

_OF_LOADING = frozenset(
    ("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
     "use_mlock", "embedding_only", "num_thread", "num_keep", "draft_num_predict")
)  # fmt: skip
"""Options for loading a model; here that is decided when the server starts."""


class Options(DrawFields):
    """The options that are honoured, or whose effect is told. Ollama's other names of them are synonyms."""

    num_predict: int | None = None
    num_ctx: int | None = None
    repeat_last_n: int | None = None
    stop: list[str] | str | None = None
    penalize_newline: bool | None = None


_KNOWN = frozenset(Options.__struct_fields__)


def read_options(given: Mapping[str, Any] | None) -> tuple[Options, list[str]]:
    """The options, and warnings about those that have no effect.

    Raises:
        InvalidParameter: one has the wrong type.
        UnsupportedParameter: one asks for a sampler that does not exist here.
    """
    whole = {name: as_whole(value) for name, value in (given or {}).items()}
    try:
        options = msgspec.convert({name: value for name, value in whole.items() if name in _KNOWN}, Options)
    except msgspec.ValidationError as error:
        what, _, path = str(error).rpartition(" - at `")
        field = f"options{path.rstrip('`').removeprefix('$')}"
        raise InvalidParameter(f"{field}: {what[:1].lower()}{what[1:]}", param=field) from None
    warnings = [f"options.{name}: no effect, the model is loaded already" for name in whole if name in _OF_LOADING]
    others = {name: value for name, value in whole.items() if name not in _OF_LOADING}
    warnings += take_foreign_fields(options, others, "options.")
    if options.num_predict == 0:
        raise InvalidParameter(
            "options.num_predict must be at least 1, or negative for no limit", param="options.num_predict"
        )
    if options.repeat_last_n not in (None, -1):
        warnings.append("options.repeat_last_n: no effect, penalties look at the whole text")
    if options.penalize_newline is False:
        warnings.append("options.penalize_newline: no effect, line breaks are tokens like others")
    return options, warnings


def set_sampling(request: SamplingRequest, options: Options) -> None:
    """Write the options into a request of our own schema."""
    request.max_tokens = -1 if options.num_predict is None or options.num_predict < 0 else options.num_predict
    for name, value in options.draws().items():
        setattr(request, name, value)
    request.seed = None if options.seed is None or options.seed < 0 else options.seed
    request.stop = options.stop


def with_options(
    common: ValidRequest, request: OllamaRequest, options: Options, warnings: list[str], rules: Rules
) -> ValidRequest:
    """A checked request with the options that our own schema has no fields for: context length and format."""
    length = context_length(options, warnings, rules)
    if request.shift:
        warnings.append("shift: no effect, a text ends when the context is full")
    source = _format_source(request.format)
    if source is not None:
        check_ending(SamplingRequest(), "format", rules.eos_token_ids)
    return replace(
        common,
        model=request.model or common.model,
        max_model_len=length,
        max_tokens_field="options.num_predict",
        grammar=source,
        warnings=(*common.warnings, *warnings),
    )


def context_length(options: Options, warnings: list[str], rules: Rules) -> int:
    """Tokens of the context: as many as requested, at most as many as the model has."""
    asked, most = options.num_ctx, rules.max_model_len
    if asked is None:
        return most
    if asked < 1:
        raise InvalidParameter("options.num_ctx must be at least 1", param="options.num_ctx")
    if asked > most:
        warnings.append(f"options.num_ctx: {most} instead of {asked}, which is this server's context")
    return min(asked, most)


def _format_source(wanted: str | dict[str, Any] | None) -> GrammarSource | None:
    if wanted in (None, ""):
        return None
    if wanted == "json":
        return schema_source("format", None)
    if isinstance(wanted, dict):
        return schema_source("format", wanted)
    raise InvalidParameter(f"format must be 'json' or a JSON schema, got {str(wanted)[:64]!r}", param="format")


def thinking_variables(think: bool | str | None, model: TextModel, name: str) -> dict[str, Any]:
    """The chat template's variables for thinking.

    Raises:
        InvalidParameter: `think` is not a known level.
        UnsupportedParameter: the model does not think.
    """
    if think is None:
        return {}
    if isinstance(think, str) and think not in THINKING_LEVELS:
        raise InvalidParameter(f"think must be true, false, or one of {', '.join(THINKING_LEVELS)}", param="think")
    if think is False:
        return {} if model.reasoning_format is None else {"reasoning_effort": "none"}
    if model.reasoning_format is None:
        raise UnsupportedParameter(f"{name!r} does not support thinking", param="think")
    if think is True:
        switch = None if model.template is None else thinking_switch(model.template)
        return {} if switch is None else {switch: True}
    return {"reasoning_effort": "high" if think == "max" else think}


def served_name(name: str | None, names: tuple[str, ...]) -> str:
    """The served name that a client means; the client may add `:latest`, or leave it out.

    Raises:
        ModelNotFound: no served name is meant.
    """
    if not name:
        return names[0]
    for served in names:
        if _means(name, served):
            return served
    raise ModelNotFound(f"model {name[:256]!r} not found; served: {shown_name(names[0])!r}", param="model")


def _means(name: str, served: str) -> bool:
    return name in (served, served + LATEST) or name + LATEST == served


async def serving(service: Service, name: str | None) -> Service:
    """The service for requests to the model that a client means.

    Raises:
        Unavailable: as `Service.serving`.
    """
    meant = next((served for served in service.names if name and _means(name, served)), name)
    return await service.serving(meant)


def shown_name(served: str) -> str:
    """The name as Ollama lists it, with a tag: clients add a tag to names without one, and look for the result."""
    return served if ":" in served else served + LATEST


def image_parts(field: str, images: object, name: str, limits: ImageLimits | None) -> list[dict[str, Any]]:
    """The parts of a chat message for images, which Ollama's clients send as base64.

    Raises:
        UnsupportedParameter: the model takes no images.
        InvalidParameter: the images are not a list of texts.
    """
    if not images:
        return []
    if limits is None:
        raise UnsupportedParameter(f"{name!r} does not support images", param="images")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidParameter(f"{field}: expected a list of images in base64", param=field)
    return [{"type": "image_url", "image_url": f"data:;base64,{image}"} for image in images]


def refuse_template(template: str | None) -> None:
    """Refuse a template: Ollama's are written in Go's syntax; here the checkpoint's own is used."""
    if template:
        raise UnsupportedParameter(
            "template is not supported: the checkpoint's own chat template is used; --chat-template gives another one, "
            "and raw sends a prompt as it is",
            param="template",
        )
