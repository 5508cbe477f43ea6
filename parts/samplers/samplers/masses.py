"""Which tokens are needed for a mass: what top-p and typical sampling share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_FIRST, _GROWTH = 256, 16
"""On a CPU, a sort of a large vocabulary takes thirty milliseconds; nearly always, the first few tokens are enough."""


def first_until(keys: "Tensor", p: "Tensor", mass: float) -> "Tensor":
    """The tokens with the smallest keys, until their probabilities add up to `mass`; at least one.

    Args:
        keys: fp32[V], what they are sorted by; of equal ones, the smaller id comes first.
        p: fp32[V], their probabilities.
        mass: at most 1.

    Returns:
        int64[k], in order.
    """
    size = keys.shape[0]
    num = min(_FIRST, size) if keys.device.type == "cpu" else size
    while True:
        if num < size:
            limit = keys.topk(num, largest=False, sorted=False).values.max()
            ids = (keys <= limit).nonzero()[:, 0]
            ids = ids[keys[ids].argsort(stable=True)]
        else:
            ids = keys.argsort(stable=True)
        its = p[ids]
        total = its.cumsum(0)
        if num == size or total[-1] >= mass:
            kept = total - its < mass
            kept[0] = True  # also with a mass of 0
            return ids[kept]
        num = min(num * _GROWTH, size)
