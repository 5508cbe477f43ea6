"""Norms of q and k that span all heads, where each rank has some of the heads."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.norms import NormWeights


class NormsOverRanks(NamedTuple):
    """Root mean square norms, over the heads of all ranks."""

    q: NormWeights  # of this rank's q heads, [Hq * D]
    k: NormWeights | None  # of this rank's KV heads, [Hk * D]; None if another layer's keys are read
    num_q: int  # numbers in the q heads of all ranks
    num_k: int  # numbers in the KV heads of all ranks, with all copies of a head counted
    ranks: Ranks

    def __call__(self, qkv: Tensor) -> Tensor:
        """Norm q and k in [T, (Hq + 2 * Hk) * D], in place. The ranks exchange two numbers for each token."""
        assert self.q.weight is not None
        q = qkv[:, : len(self.q.weight)]
        sums = [q.float().square().sum(-1)]
        if self.k is not None and self.k.weight is not None:
            k = qkv[:, q.shape[1] : q.shape[1] + len(self.k.weight)]
            sums.append(k.float().square().sum(-1))
        of_all = self.ranks.all_reduce(torch.stack(sums, dim=-1))
        q.copy_(_scaled(q, of_all[:, :1] / self.num_q, self.q))
        if self.k is not None and len(sums) > 1:
            k.copy_(_scaled(k, of_all[:, 1:] / self.num_k, self.k))
        return qkv


def _scaled(x: Tensor, mean_square: Tensor, weights: NormWeights) -> Tensor:
    """Rounds as `norm` with a root mean square does."""
    assert weights.weight is not None
    unit = x.float() * torch.rsqrt(mean_square + weights.eps)
    return unit.to(x.dtype) * weights.weight if weights.weight.dtype == x.dtype else unit * weights.weight
