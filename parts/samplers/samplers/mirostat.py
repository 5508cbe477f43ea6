"""Mirostat (Basu et al., 2021), versions 1 and 2 as llama.cpp has them: the surprise of tokens is held at a target."""

from collections.abc import Mapping
from math import log
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


_MOST_LIKELY = 100
"""From so many tokens, version 1 estimates how fast probabilities fall."""


class Mirostat(Sampler):
    """Keeps tokens of at most a surprise of mu, in bits, which starts at twice tau; the best one always stays.

    After each token, mu loses eta times what the token's surprise among the kept tokens exceeds tau by. Version 1 does
    not look at each token's surprise: it keeps as many as would have it if probabilities fell like a power of the rank.
    """

    name = "mirostat"
    beside = ("logit_bias", "temperature")
    keeps = True
    parameters = (
        Parameter("mirostat", 0, 0, 2, help="version of Mirostat, 1 or 2; 0: off", synonyms=("mirostat_mode",)),
        Parameter("mirostat_tau", 5.0, 0.0, 100.0, help="the surprise that Mirostat aims at, in bits"),
        Parameter("mirostat_eta", 0.1, 0.0, 100.0, help="how fast Mirostat corrects itself"),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        version = given["mirostat"]
        return (version, given["mirostat_tau"], given["mirostat_eta"]) if version else None

    @classmethod
    def first_state(cls, values: tuple[float, ...]) -> float:
        return 2 * values[1]

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        if values[0] == 1:
            return _first_version(z, draw.state)
        dropped = -z.log_softmax(-1) / log(2) > draw.state
        return z.masked_fill(dropped.index_fill(0, z.argmax(-1, keepdim=True), False), -float("inf"))

    @classmethod
    def kept(cls, z: "Tensor", values: tuple[float, ...], state: "Tensor", token: "Tensor") -> "Tensor":
        _, tau, eta = values
        surprise = -z.log_softmax(-1).gather(0, token.view(1))[0] / log(2)
        return state - eta * (surprise - tau)


def _first_version(z: "Tensor", mu: "Tensor") -> "Tensor":
    size = z.shape[0]
    logp, ids = z.double().log_softmax(-1).sort(descending=True, stable=True)
    falls = -logp[:_MOST_LIKELY].diff()  # from one rank to the next
    ranks = z.new_ones(falls.shape[0], dtype=logp.dtype).cumsum(0)
    steps = ((ranks + 1) / ranks).log()
    counts = falls.isfinite()  # not behind the last token that can be drawn
    exponent = (steps * falls).where(counts, 0).sum() / (steps**2).where(counts, 0).sum()
    excess = exponent - 1
    num = (excess * 2.0 ** mu.double() / (1 - float(size) ** -excess)) ** (1 / exponent)
    num = num.nan_to_num(nan=1.0, posinf=size).floor()  # NaN if one token has all the probability
    kept = (ranks.new_ones(size).cumsum(0) <= num).index_fill(0, ids.new_zeros(1), True)
    return z.index_fill(0, ids[~kept], -float("inf"))
