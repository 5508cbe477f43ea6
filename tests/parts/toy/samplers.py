"""A sampler: all that it takes is this file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class Favourite(Sampler):
    """Draws one token and no other."""

    name = "toy_favourite"
    parameters = (Parameter("toy_token", -1, -1, 2**31 - 1, help="the only token that is drawn; -1: any"),)

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["toy_token"],) if given["toy_token"] >= 0 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        z.fill_(-float("inf"))[int(values[0])] = 0.0
        return z


PARTS = (Favourite,)
