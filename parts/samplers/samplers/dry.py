"""DRY, don't repeat yourself: tokens that would continue a repetition lose by its length."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.samplers import Draw, Parameter, Sampler

if TYPE_CHECKING:
    from torch import Tensor


_MOST = 1e30
"""The largest penalty: logits stay finite."""

_LONGEST = 50
"""A repetition counts as no longer than this, so that penalties stay finite."""


class Dry(Sampler):
    """Where the last m tokens have been seen before, the token that followed loses multiplier * base^(m - allowed).

    The longest such repetition of each token counts. None reaches over a token that ends a breaker, which never loses.
    """

    name = "dry"
    others = ("d",)
    penalizes = True
    parameters = (
        Parameter("dry_multiplier", 0.0, 0.0, 100.0, help="penalty of the shortest repetition that counts; 0: off"),
        Parameter("dry_base", 1.75, 1.0, 8.0, help="how fast the penalty grows with the length"),
        Parameter("dry_allowed_length", 2, 1, _LONGEST, help="the longest repetition that costs nothing to continue"),
        Parameter("dry_penalty_last_n", -1, -1, 2**31 - 1, help="look at this many last tokens; -1: all, 0: off"),
        Parameter("dry_range", 0, 0, 2**31 - 1, help="look at this many last tokens; 0: all"),
        Parameter("dry_sequence_breakers", ("\n", ":", '"', "*"), help="texts over which no repetition reaches"),
    )

    @classmethod
    def values(cls, given: Mapping[str, Any]) -> tuple[float, ...] | None:
        multiplier, last = given["dry_multiplier"], given["dry_penalty_last_n"]
        if multiplier <= 0 or last == 0:
            return None
        window = max(last, 0) or given["dry_range"]
        return (multiplier, given["dry_base"], given["dry_allowed_length"], window)

    @classmethod
    def texts(cls, given: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(given["dry_sequence_breakers"])

    @classmethod
    def apply(cls, z: "Tensor", values: tuple[float, ...], draw: Draw) -> "Tensor":
        multiplier, base, allowed, window, *breakers = values
        tokens: Tensor = draw.token_ids.long()[-int(window) if window else 0 :]
        n = tokens.shape[0]
        if n <= allowed:
            return z
        width = min(_LONGEST, n - 1)
        # Row i holds the `width` tokens up to the i-th, the last one first; -1 stands before the first token.
        ends = tokens.new_full((n + width - 1,), -1)
        ends[width - 1 :] = tokens
        ends = ends.unfold(0, width, 1).flip(1)
        last = ends[-1]
        joins = ends[:-1] == last
        for breaker in breakers:
            joins &= last != int(breaker)
        lengths = joins.long().cumprod(1).sum(1)
        penalties = (multiplier * base ** (lengths.to(z.dtype) - allowed)).clamp(max=_MOST)
        penalties = penalties.masked_fill(lengths < allowed, 0.0)
        of_tokens = z.new_zeros(z.shape[0]).scatter_reduce_(0, tokens[1:], penalties, "amax")
        return z - of_tokens.index_fill(0, tokens.new_tensor([int(breaker) for breaker in breakers]), 0.0)
