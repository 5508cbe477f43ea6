"""How tokens are drawn, by the names that vLLM uses; checked as the server checks these fields of a request."""

from enum import Enum
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.schema import CompletionRequest
from penstock.frontend.schema import StructuredOutputs as StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


class RequestOutputKind(Enum):
    """What a stream tells each time: all so far, what is new, or everything once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(Struct, kw_only=True, forbid_unknown_fields=True):
    """What is None is as the checkpoint's generation_config.json says, else neutral."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: all tokens
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | UnsetType | None = UNSET  # None: the rest of the context. Unset: 16, and the rest for chats
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # of so many best tokens, and of the one that was drawn
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None  # the last ones are kept; -1: as many as fit
    speculative: bool | dict[str, int] | None = None  # False: no guesses. {"num_speculative_tokens": k}: k at most
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of streams

    def request(self, prompt: str | list[int] | None = None) -> CompletionRequest:
        """The same as the server gets it, for a prompt.

        Raises:
            InvalidParameter: if a field has another type. What is out of bounds is found later.
        """
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        del fields["output_kind"]
        asked = fields.pop("max_tokens")
        if asked is not UNSET:
            fields["max_tokens"] = -1 if asked is None else asked
        if self.logit_bias:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if isinstance(self.structured_outputs, Struct):
            fields["structured_outputs"] = msgspec.structs.asdict(self.structured_outputs)
        try:
            return msgspec.convert(fields | {"prompt": prompt}, CompletionRequest)
        except msgspec.ValidationError as error:
            what, _, path = str(error).rpartition(" - at `$")
            field = path.rstrip("`").lstrip(".") or "sampling_params"
            raise InvalidParameter(f"{field}: {(what or str(error)).lower()}", param=field) from None
