"""Checks of requests for embeddings."""

from dataclasses import dataclass, replace

from penstock.frontend import schema
from penstock.frontend.embeddings.prompts import asked_prompt
from penstock.frontend.embeddings.schema import EmbeddingRequest
from penstock.frontend.errors import InvalidParameter
from penstock.frontend.validation.common import Rules, ValidRequest, integer, refuse_unsupported, validate_common
from penstock.frontend.validation.completion import valid_prompts
from penstock.ipc.messages import Pooling, SamplingParams
from penstock.models.embeddings import Embeddings

MAX_INPUTS = 2048
"""OpenAI's limit."""


@dataclass(frozen=True, slots=True)
class ValidEmbedding:
    """A checked request; its texts are not tokenized yet."""

    common: ValidRequest
    inputs: list[str] | list[list[int]]
    is_base64: bool
    add_special_tokens: bool
    prompt: str = ""  # which goes before each text

    @property
    def num_added(self) -> int:
        """The most tokens that the prompt before each text adds to all of them together."""
        return len(self.inputs) * len(self.prompt.encode())


def validate_embedding(
    request: EmbeddingRequest, rules: Rules, kind: Embeddings, *, keeps_start: bool = False
) -> ValidEmbedding:
    """Check a request against this server's limits and the model's kind of embeddings.

    `keeps_start`: whether texts that are cut keep their start, unless the request says which side is cut.

    Raises:
        InvalidRequest: one of its kinds (see `errors.py`).
    """
    refuse_unsupported(request)
    if request.encoding_format not in (None, "float", "base64"):
        raise InvalidParameter(
            f"encoding_format must be 'float' or 'base64', got {request.encoding_format[:64]!r}",
            param="encoding_format",
        )
    size = 0
    if request.dimensions is not None:
        if not kind.hidden_size:
            raise InvalidParameter("dimensions: config.json does not say how many there are", param="dimensions")
        size = integer("dimensions", request.dimensions, 0, 1, kind.hidden_size)
    if request.input is None:
        raise InvalidParameter("input is required", param="input")
    common = validate_common(
        schema.SamplingRequest(
            model=request.model,
            user=request.user,
            priority=request.priority,
            cache_salt=request.cache_salt,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            truncation_side=request.truncation_side or ("right" if keeps_start else None),
            return_bill=request.return_bill,
        ),
        rules,
        max_tokens=1,
        prompt_field="input",
    )
    longest = min(rules.max_model_len, kind.max_len or rules.max_model_len)
    prompt, warnings = asked_prompt(request, kind)
    inputs = valid_prompts("input", request.input, rules, MAX_INPUTS)
    if inputs and not isinstance(inputs[0], str):
        if request.prompt_name is not None:
            raise InvalidParameter("prompt_name: a prompt can only go before a text", param="prompt_name")
        prompt = ""
    is_normalized = kind.is_normalized if request.normalize is None else request.normalize
    pooling = Pooling(kind.kind, 0 if size == kind.hidden_size else size, is_normalized)
    return ValidEmbedding(
        common=replace(
            common,
            sampling=SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling),
            max_model_len=longest,
            warnings=(*common.warnings, *warnings),
        ),
        inputs=inputs,
        is_base64=request.encoding_format == "base64",
        add_special_tokens=request.add_special_tokens is not False,
        prompt=prompt,
    )
