"""Epsilon and eta cutoffs (Hewitt et al., 2022): tokens below a probability go."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


_UNIT = 1e-4
"""Both parameters are in units of this."""


class EpsilonCutoff(Sampler):
    """Removes tokens less likely than epsilon; the best one stays."""

    name = "epsilon_cutoff"
    parameters = (Parameter("epsilon_cutoff", 0.0, 0.0, 9999.0, help="least probability, in units of 1e-4; 0: off"),)

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["epsilon_cutoff"] * _UNIT,) if given["epsilon_cutoff"] > 0 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        return z.masked_fill((z.softmax(-1) < values[0]) & (z < z.max()), -float("inf"))


class EtaCutoff(Sampler):
    """Removes tokens less likely than min(epsilon, sqrt(epsilon) exp(-entropy)); the best one stays."""

    name = "eta_cutoff"
    parameters = (
        Parameter("eta_cutoff", 0.0, 0.0, 9999.0, help="epsilon of the eta cutoff, in units of 1e-4; 0: off"),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["eta_cutoff"] * _UNIT,) if given["eta_cutoff"] > 0 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        (epsilon,) = values
        logp = z.log_softmax(-1)
        p = logp.exp()
        eta = (epsilon**0.5 * (p * logp).nansum().exp()).clamp(max=epsilon)
        return z.masked_fill((p < eta) & (z < z.max()), -float("inf"))
