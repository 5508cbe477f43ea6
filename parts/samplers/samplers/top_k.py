"""Top-k: the k best tokens."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.config.samplers import Draw, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class TopK(Sampler):
    """Keeps the k best tokens, and those that tie with the last of them."""

    name = "top_k"
    others = ("k",)
    neutral: ClassVar[Mapping[str, Any]] = {"top_k": 0}

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["top_k"],) if given["top_k"] > 0 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        k = min(int(values[0]), z.shape[0])
        return z.masked_fill(z < z.topk(k).values[-1], -float("inf"))
