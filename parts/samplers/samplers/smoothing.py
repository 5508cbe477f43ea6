"""Quadratic sampling: logits are bent by their distance to the largest one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


class Smoothing(Sampler):
    """With distance d to the largest logit, factor f and curve c: (3 - c)/2 f d^2 + (c - 1)/2 f d^3 below it."""

    name = "smoothing"
    others = ("quadratic_sampling", "quadratic")
    heats = True
    parameters = (
        Parameter("smoothing_factor", 0.0, 0.0, 100.0, help="strength of quadratic sampling; 0: off"),
        Parameter("smoothing_curve", 1.0, 1.0, 100.0, help="how much steeper it falls far from the largest logit"),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        factor = given["smoothing_factor"]
        return (factor, given["smoothing_curve"]) if factor > 0 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        factor, curve = values
        top = z.max()
        below = z - top
        bent = top - (3 - curve) / 2 * factor * below**2 + (curve - 1) / 2 * factor * below**3
        return bent.where(z.isfinite(), z)
