"""`--speculative-config`: who guesses tokens ahead of the model, and how many. The keys are vLLM's."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from penstock.parts.drafts.token_trees import LIKELIEST, token_tree

Method = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "grammar"]

_ONLY_FOR = {
    "prompt_lookup_": "ngram",
    "suffix_decoding_": "suffix",
    "speculative_token_tree": "medusa",
    **dict.fromkeys(("draft_tensor_parallel_size", "quantization", "max_model_len"), "draft_model"),
}
"""Keys, by how they begin, that one method knows."""
_WITHOUT_MODEL = {
    **dict.fromkeys(("ngram", "suffix"), "the text itself"),
    "grammar": "the grammars of requests",
    "mtp": "the model's own checkpoint",
}
_EXACT = "a draft token counts only where the model draws the same token"
_NOT_HERE = {
    "disable_by_batch_size": "the number of draft tokens follows the load by itself",
    "rejection_sample_method": _EXACT,
    "posterior_threshold": _EXACT,
    "posterior_alpha": _EXACT,
    "revision": "model may be the folder of a snapshot",
}
"""Other keys of vLLM's, and why there is no use for them."""
_USUAL_LENGTH = 4
_USUAL_LENGTHS = {"grammar": 16}  # its guesses are nearly always right


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One drafter."""

    method: Method | Literal[""] = ""  # empty: `draft_model`, if there is a model
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=64)] = 0  # for a row in a step at most; 0: what suits most
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] = 2  # tokens of an n-gram that is looked for
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 32  # the longest that was there before counts
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=1, le=64)] = 24  # tokens that a match may have
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10_000  # outputs that are kept; 0: none
    suffix_decoding_max_cached_tokens: Annotated[int, Meta(ge=2**10, le=2**28)] = 2**20  # of them; a power of two
    suffix_decoding_max_spec_factor: Annotated[float, Meta(ge=0)] = 1.0  # guesses for each token of a match
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1  # share of places that agree on a guess
    model: str = ""  # the drafter's checkpoint: a folder, or a name as MODEL has it; eagle: or demo
    speculative_token_tree: str = ""  # paths of ranks, or `likeliest`; empty: a chain
    draft_tensor_parallel_size: int | None = None  # every rank holds the whole draft model: 1
    quantization: str | None = None  # of the draft model; as --quantization
    max_model_len: Annotated[int, Meta(ge=1)] | None = None  # in longer sequences nothing is guessed


def speculative_config(text: str) -> SpeculativeConfig | None:
    """Read the option; None if it is empty.

    Raises:
        ValueError: what is wrong with it.
    """
    if not text:
        return None
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        for key in given.keys() & _NOT_HERE:
            raise ValueError(f"there is no key {key}: {_NOT_HERE[key]}")
        found = msgspec.convert(given, type=SpeculativeConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    if not found.method:
        if not found.model:
            raise ValueError("method is required")
        found = replace(found, method="draft_model")
    if found.method == "draft_model":
        if not found.model:
            raise ValueError("method draft_model needs `model`, the checkpoint of the draft model")
        if found.draft_tensor_parallel_size not in (None, 1):
            raise ValueError(
                f"draft_tensor_parallel_size {found.draft_tensor_parallel_size}: every rank holds the whole draft "
                "model, which is small; only 1 is supported"
            )
    for key, value in given.items():
        if value is not None and any(key.startswith(known) and found.method != of for known, of in _ONLY_FOR.items()):
            raise ValueError(f"{key} has no effect with method {found.method}")
    if found.method in _WITHOUT_MODEL and found.model:
        raise ValueError(
            f"model has no effect with method {found.method}, which looks into {_WITHOUT_MODEL[found.method]}"
        )
    if found.prompt_lookup_min > found.prompt_lookup_max:
        raise ValueError(
            f"prompt_lookup_min {found.prompt_lookup_min} exceeds prompt_lookup_max {found.prompt_lookup_max}"
        )
    if found.suffix_decoding_max_cached_tokens.bit_count() != 1:
        raise ValueError(
            f"suffix_decoding_max_cached_tokens {found.suffix_decoding_max_cached_tokens}: not a power of 2"
        )
    if found.speculative_token_tree not in ("", LIKELIEST):
        num_nodes = len(token_tree(found.speculative_token_tree, 0, 0))
        if found.num_speculative_tokens not in (0, num_nodes):
            raise ValueError(
                f"num_speculative_tokens {found.num_speculative_tokens}: speculative_token_tree has {num_nodes} nodes"
            )
        return replace(found, num_speculative_tokens=num_nodes)
    if not found.num_speculative_tokens:
        return replace(found, num_speculative_tokens=_USUAL_LENGTHS.get(found.method, _USUAL_LENGTH))
    return found
