"""How tokens are sampled, with vLLM's names. Fields are checked as the server checks them in a request."""

from enum import Enum
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.schema import CompletionRequest, SamplerFields
from penstock.frontend.schema import StructuredOutputs as StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]


class RequestOutputKind(Enum):
    """What each output of a stream contains: everything so far, only what is new, or everything once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class BeamSearchParams(Struct, kw_only=True, forbid_unknown_fields=True):
    """A search for the most likely sequences, in place of draws."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # without effect, as nothing is drawn
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # or "never"
    include_stop_str_in_output: bool = False  # whether sequences keep the token that ended them

    def sampling(self) -> "SamplingParams":
        """The same as parameters of `generate`."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            skip_special_tokens=False,
            logprobs=0,
        )


class SamplingParams(SamplerFields, kw_only=True, forbid_unknown_fields=True):
    """Fields that are None get the value in the checkpoint's generation_config.json, or else a neutral one.

    The parameters of samplers are fields, too, with the names that requests have (`config/samplers.py`).
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: all tokens
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | UnsetType | None = UNSET  # None: the rest of the context. Unset: 16; for chats the rest
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # for this many best tokens, and for the sampled one
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None  # how many of the last ones are kept; -1: as many as fit
    speculative: bool | dict[str, int] | None = None  # False: no guesses. {"num_speculative_tokens": k}: at most k
    use_beam_search: bool | None = None
    beam_width: int | None = None  # None: as many as `n`
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # for streams

    def request(self, prompt: str | list[int] | None = None) -> CompletionRequest:
        """These parameters and a prompt as a request to the server.

        Raises:
            InvalidParameter: if a field has the wrong type. Values out of bounds are found later.
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
