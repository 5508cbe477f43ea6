"""Locally typical sampling (Meister et al., 2023): tokens whose surprise is close to the expected one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler
from penstock.parts.samplers.samplers.masses import first_until

if TYPE_CHECKING:
    from torch import Tensor


class Typical(Sampler):
    """Keeps the tokens closest to the entropy, until their probabilities add up to `typical_p`."""

    name = "typical_p"
    others = ("typ_p", "typical", "y")
    parameters = (
        Parameter(
            "typical_p", 1.0, help="keep the tokens of most typical surprise, up to this mass", synonyms=("typical",)
        ),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        return (given["typical_p"],) if given["typical_p"] < 1 else None

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        logp = z.log_softmax(-1)
        p = logp.exp()
        entropy = -(p * logp).nansum()  # 0 times infinity counts as 0
        ids = first_until((-logp - entropy).abs(), p, values[0])
        return z.new_full(z.shape, -float("inf")).index_copy_(0, ids, z[ids])
