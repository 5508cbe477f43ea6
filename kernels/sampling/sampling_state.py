"""The sampling parameters of all rows, on the device and on the host."""

from typing import NamedTuple

from torch import Tensor

NOT_FINITE = -1
"""Replaces a row's token: some of its logits are NaN or plus infinity."""
NOTHING_LEFT = -2
"""Replaces a row's token: all of its logits are minus infinity."""


class SamplingState(NamedTuple):
    """Per-row parameters and tokens on the device (R rows); -1 pads the ragged id lists.

    First come the columns with one number for each row: those in fp32, then those in int64.
    """

    temperature: Tensor  # fp32[R], 0 is greedy
    top_p: Tensor  # fp32[R], 1 is off
    min_p: Tensor  # fp32[R], 0 is off
    repetition_penalty: Tensor  # fp32[R], 1 is off
    presence_penalty: Tensor  # fp32[R]
    frequency_penalty: Tensor  # fp32[R]
    seed: Tensor  # int64[R]
    top_k: Tensor  # int64[R], 0 is off
    min_tokens: Tensor  # int64[R]
    num_prompt_tokens: Tensor  # int64[R]
    token_ids: Tensor  # int32[R, L], prompt and outputs by position
    stop_ids: Tensor  # int32[R, K], masked until min_tokens outputs exist
    bias_ids: Tensor  # int32[R, B], each at most once per row
    bias_values: Tensor  # fp32[R, B]


_NAMES = SamplingState._fields
FLOATS = _NAMES[: _NAMES.index("seed")]
INTS = _NAMES[len(FLOATS) : _NAMES.index("token_ids")]
"""The columns with one number for each row."""


class SamplingNeeds(NamedTuple):
    """What at least one row of a batch needs. The host knows it, so nothing is read back from the device."""

    random: bool = False  # some temperature > 0
    bias: bool = False
    min_tokens: bool = False
    penalties: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p: bool = False

    @property
    def nothing(self) -> bool:
        """Plain greedy: the argmax is the answer."""
        return not any(self)
