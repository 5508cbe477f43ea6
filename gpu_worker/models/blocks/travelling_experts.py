"""Experts that are spread over ranks, where the tokens of long steps travel to them.

Each rank routes its share of the tokens. It sends each token once to every rank that has experts for it, and adds up
the results in the order of the ranks. The alternative is that every rank computes its experts for all tokens.
`models/shards/exchange.py` decides in which steps tokens travel because that costs less.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.gpu_worker.models.blocks.experts import ExpertsBlock, turns_of
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.kernels.experts.held_experts import HeldExperts


class TravellingExperts(NamedTuple):
    """A rank's part of a mixture, and its connection to the other parts. Its output is the sum over the ranks."""

    block: ExpertsBlock
    held: HeldExperts  # the block's
    ranks: Ranks
    fewest: int  # tokens in a step from which they travel; never in captured graphs, since the counts sent vary

    def __call__(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, H] -> [T, H]"""
        num_tokens = x.shape[0]
        if num_tokens < self.fewest or inputs.host_lens is None:
            return self.ranks.all_reduce(self.block(x, inputs))
        share = self._share(num_tokens)
        routed = self._exchange(x[share], turns_of(inputs)[share], inputs)
        if self.block.shared is None:
            return self._gather(routed, num_tokens)
        out = self.block.of_shared(self.block.shared, x, inputs)
        out[share] += routed
        return self.ranks.all_reduce(out)

    def _share(self, num_tokens: int) -> slice:
        """The tokens that this rank routes: equally many on each rank, except on the last ones."""
        place = self.ranks.place
        each = -(-num_tokens // place.num_tensor)
        return slice(min(place.tensor * each, num_tokens), min((place.tensor + 1) * each, num_tokens))

    def _exchange(self, x: Tensor, turns: Tensor, inputs: ForwardInputs) -> Tensor:
        """The output of all experts for this rank's share: [n, H] -> [n, H]."""
        num_ranks = self.ranks.place.num_tensor
        ids, weights = self.block.choose(x)
        wanted = torch.zeros(num_ranks, x.shape[0], dtype=torch.bool, device=x.device)
        wanted.scatter_(0, self.held.ranks_of(ids, turns).t().long(), True)
        sent = wanted.sum(1)
        received = self.ranks.all_to_all(sent, [1] * num_ranks, [1] * num_ranks).tolist()
        tokens, counts = wanted.nonzero()[:, 1], sent.tolist()
        columns = [each.index_select(0, tokens) for each in (x, ids, weights, turns[:, None])]
        rows = self.ranks.all_to_all(torch.cat([_bytes(column) for column in columns], dim=1), counts, received)
        parts = rows.split([column.shape[1] * column.itemsize for column in columns], dim=1)
        got = [part.contiguous().view(column.dtype) for part, column in zip(parts, columns, strict=True)]
        numbers = self.held.counted(got[1], got[3].squeeze(1))
        back = self.ranks.all_to_all(self.block.mix(got[0], numbers, got[2], inputs), received, counts)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for its, of_rank in zip(tokens.split(counts), back.split(counts), strict=True):
            total.index_add_(0, its, of_rank.float())  # each token once, so sums are in the order of ranks
        return total.to(x.dtype)

    def _gather(self, share: Tensor, num_tokens: int) -> Tensor:
        """Gather all tokens from the ranks' shares: [n, H] -> [T, H]."""
        num_ranks, width = self.ranks.place.num_tensor, share.shape[1]
        padded = share.new_zeros(-(-num_tokens // num_ranks), width)
        padded[: share.shape[0]] = share
        return self.ranks.all_gather(padded.flatten()).view(-1, width)[:num_tokens]


def _bytes(column: Tensor) -> Tensor:
    """uint8[n, m]"""
    return column.contiguous().view(torch.uint8)
