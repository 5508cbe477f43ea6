"""XTC, exclude top choices: sometimes removes the most likely tokens, so that another good one is drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


_MOST = 0.5
"""With a threshold above this, there cannot be two tokens above it."""


class Xtc(Sampler):
    """With a probability, removes all tokens above the threshold except the least likely one of them."""

    name = "xtc"
    others = ("x",)
    parameters = (
        Parameter("xtc_probability", 0.0, help="how often top choices are excluded"),
        Parameter("xtc_threshold", 0.1, help="how likely a token must be to be a top choice; above 0.5: off"),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        probability, threshold = given["xtc_probability"], given["xtc_threshold"]
        return (probability, threshold) if probability > 0 and threshold <= _MOST else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        probability, threshold = values
        if draw.uniform() > probability:
            return z
        p = z.softmax(-1)
        tops = (p >= threshold).nonzero()[:, 0]
        best_first = tops[p[tops].argsort(descending=True, stable=True)]
        return z.index_fill(0, best_first[:-1], -float("inf"))
