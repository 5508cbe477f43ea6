"""The experts of a mixture that this rank holds, when other ranks hold the rest, or copies of the same experts.

A token's turn (its position plus its id) decides which copy of each of its experts serves the token. So the copies
share the tokens. The choice is the same on every rank, in any batch, and when the token is computed again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class HeldExperts(NamedTuple):
    """Tables on the rank's device for E experts, of which L are held here; C is the most copies of any expert."""

    rank: int
    num_held: int  # L
    numbers: Tensor  # int32[E], each expert's number among the held ones, in order; -1: not held here
    copies: Tensor  # int32[E], which copy of each expert is held here; -1: none
    num_copies: Tensor  # int32[E]
    ranks: Tensor  # int32[E, C], the ranks that hold each expert's copies
    tokens: Tensor  # int64[L + 1], counts of tokens that each held expert has computed; last, those of other ranks

    def ids(self) -> list[int]:
        """The held experts, by their numbers in the mixture."""
        return (self.numbers >= 0).nonzero().flatten().tolist()

    def copies_of(self, ids: Tensor, turns: Tensor) -> Tensor:
        """Which copy of each expert serves a token.

        Args:
            ids: int32[T, k], each token's experts.
            turns: int[T].

        Returns:
            int[T, k].
        """
        return turns[:, None] % self.num_copies[ids]

    def serving(self, ids: Tensor, turns: Tensor) -> Tensor:
        """int32[T, k], the numbers of the held experts that serve each token; L where another rank's copy does."""
        is_here = self.copies_of(ids, turns) == self.copies[ids]
        return torch.where(is_here, self.numbers[ids], self.num_held)

    def ranks_of(self, ids: Tensor, turns: Tensor) -> Tensor:
        """int32[T, k], the rank that serves each token for each of its experts."""
        return self.ranks[ids, self.copies_of(ids, turns)]

    def counted(self, ids: Tensor, turns: Tensor, are_real: Tensor | None = None) -> Tensor:
        """As `serving`, and count the tokens where `are_real`, bool[T]. Nothing is read back from the device."""
        numbers = self.serving(ids, turns)
        ones = torch.ones_like(numbers) if are_real is None else are_real[:, None].expand_as(numbers)
        self.tokens.scatter_add_(0, numbers.flatten().long(), ones.flatten().long())
        return numbers


def held_experts(rank: int, ranks_of: Sequence[Sequence[int]], device: torch.device) -> HeldExperts:
    """Make the tables for a placement.

    Args:
        rank: this rank.
        ranks_of: for each expert, the ranks that hold a copy.
        device: where the model runs.
    """
    held = [expert for expert, ranks in enumerate(ranks_of) if rank in ranks]
    most = max(map(len, ranks_of))

    def ints(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return HeldExperts(
        rank=rank,
        num_held=len(held),
        numbers=ints([held.index(expert) if rank in ranks else -1 for expert, ranks in enumerate(ranks_of)]),
        copies=ints([list(ranks).index(rank) if rank in ranks else -1 for ranks in ranks_of]),
        num_copies=ints([len(ranks) for ranks in ranks_of]),
        ranks=ints([[*ranks, *[rank] * (most - len(ranks))] for ranks in ranks_of]),
        tokens=torch.zeros(len(held) + 1, dtype=torch.int64, device=device),
    )
