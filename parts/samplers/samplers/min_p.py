"""Min-p: tokens that are not much less likely than the best one."""

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.config.samplers import Draw, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class MinP(Sampler):
    """Keeps tokens of at least `min_p` times the probability of the best one."""

    name = "min_p"
    others = ("m",)
    neutral: ClassVar[Mapping[str, Any]] = {"min_p": 0.0}

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["min_p"],) if given["min_p"] > 0 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        return z.masked_fill(z < z.max() + log(values[0]), -float("inf"))
