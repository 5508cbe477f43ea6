"""Top-n-sigma (Tang et al., 2024): tokens whose logit is within n standard deviations of the best."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class TopNSigma(Sampler):
    """Keeps logits of at least the largest minus `top_n_sigma` standard deviations of the finite ones."""

    name = "top_n_sigma"
    others = ("nsigma", "s")
    parameters = (
        Parameter(
            *("top_n_sigma", -1.0, -1.0, 1000.0),
            help="keep logits within this many standard deviations of the largest; 0 or -1: off",
            synonyms=("nsigma",),
        ),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["top_n_sigma"],) if given["top_n_sigma"] > 0 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        never = z == -float("inf")
        num = z.shape[0] - never.sum()
        mean = z.masked_fill(never, 0.0).sum() / num
        distances = (z - mean).masked_fill_(never, 0.0)
        deviation = (distances.dot(distances) / num) ** 0.5
        return z.masked_fill(z < z.max() - values[0] * deviation, -float("inf"))
