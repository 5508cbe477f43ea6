"""Top-p, nucleus sampling: the best tokens up to a mass."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.config.samplers import Draw, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class TopP(Sampler):
    """Keeps the best tokens until their probabilities add up to `top_p`, and those that tie with the last of them."""

    name = "top_p"
    others = ("p",)
    neutral: ClassVar[Mapping[str, Any]] = {"top_p": 1.0}

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["top_p"],) if given["top_p"] < 1 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        p = z.softmax(-1).sort(descending=True).values
        kept = p.cumsum(0) - p < values[0]
        kept[0] = True  # also with a mass of 0
        return z.masked_fill(z < z.sort(descending=True).values[kept][-1], -float("inf"))
