"""The temperature: logits are divided by it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.config.samplers import Draw, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class Temperature(Sampler):
    """At 0, only the best token stays, of equal ones the first."""

    name = "temperature"
    others = ("temp", "t")
    heats = True
    neutral: ClassVar[Mapping[str, Any]] = {"temperature": 1.0}

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["temperature"],) if given["temperature"] != 1 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        if values[0] > 0:
            return z / values[0]
        best = z.argmax(-1, keepdim=True)
        return z.new_full(z.shape, -float("inf")).index_copy_(0, best, z[best])
