"""The logit bias: what a request adds to some tokens' logits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.config.samplers import Draw, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class LogitBias(Sampler):
    """Values are pairs of a token id and what is added."""

    name = "logit_bias"
    neutral: ClassVar[Mapping[str, Any]] = {"logit_bias": ()}

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return tuple(float(number) for pair in given["logit_bias"] for number in pair) or None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        ids = draw.token_ids.new_tensor(values[::2]).long()
        return z.index_add(0, ids, z.new_tensor(values[1::2]))
