"""Top-p, nucleus sampling: the best tokens up to a mass."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.config.samplers import Draw, Sampler
from penstock.parts.samplers.samplers.masses import first_until

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
        last = first_until(-z, z.softmax(-1), values[0])[-1]
        return z.masked_fill(z < z[last], -float("inf"))
