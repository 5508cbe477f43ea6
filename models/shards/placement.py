"""Decides which ranks hold which experts of a mixture, with additional copies of busy experts.

The two steps are those of DeepSeek's Expert Parallelism Load Balancer (EPLB, 2025), for identical ranks. First, copies
are added one by one to the expert whose copies have the most tokens each. Then the copies, the busiest first, go to the
rank with the fewest tokens so far. No rank holds two copies of an expert. All ranks compute the same placement.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

from penstock.config.options import ConfigError

RanksOf = tuple[tuple[int, ...], ...]
"""For each expert, the ranks that hold a copy of it, ascending."""


def place_experts(
    num_experts: int, num_ranks: int, num_redundant: int = 0, tokens: Sequence[int] | None = None
) -> RanksOf:
    """Place the experts of one layer. The ranks' numbers of experts differ by at most one.

    Args:
        num_experts: experts of the mixture.
        num_ranks: ranks that share them.
        num_redundant: copies beyond the first ones.
        tokens: tokens that went to each expert; None: unknown, and assumed equal; experts then stay in order.

    Raises:
        ConfigError: a rank would have no expert, or there are too many copies for the ranks.
    """
    if num_experts + num_redundant < num_ranks:
        raise ConfigError(
            f"{num_experts} experts and {num_redundant} copies of some are fewer than {num_ranks} ranks: "
            "lower --tensor-parallel-size or raise --num-redundant-experts"
        )
    if num_redundant > (most := num_experts * (num_ranks - 1)):
        raise ConfigError(
            f"--num-redundant-experts is {num_redundant}; with {num_experts} experts on {num_ranks} ranks it may be "
            f"at most {most}: a rank holds an expert once"
        )
    if tokens is None:
        return _in_order(num_experts, num_ranks, num_redundant)
    total = num_experts + num_redundant
    room = [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]
    if len(tokens) != num_experts:
        raise ConfigError(f"tokens of {len(tokens)} experts are known, but there are {num_experts}")
    copies = _copies(tokens, num_ranks, num_redundant)
    shares = [count / number for count, number in zip(tokens, copies, strict=True)]
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for expert in sorted(range(num_experts), key=lambda expert: (-shares[expert], expert)):
        for _ in range(copies[expert]):
            _put(expert, held, loads, room, shares)
    return _ranks_of(num_experts, held)


def _in_order(num_experts: int, num_ranks: int, num_redundant: int) -> RanksOf:
    """Place neighbours together, with copies of the experts that follow them."""
    bounds = [-(-rank * num_experts // num_ranks) for rank in range(num_ranks + 1)]
    held = [set(range(begin, end)) for begin, end in pairwise(bounds)]
    copies = [1] * num_experts
    for _ in range(num_redundant):
        rank = min(range(num_ranks), key=lambda rank: (len(held[rank]), rank))
        after = bounds[rank + 1]
        others = (expert for expert in range(num_experts) if expert not in held[rank])
        expert = min(others, key=lambda expert: (copies[expert], (expert - after) % num_experts))
        held[rank].add(expert)
        copies[expert] += 1
    return _ranks_of(num_experts, held)


def _copies(tokens: Sequence[int], num_ranks: int, num_redundant: int) -> list[int]:
    """Return the number of copies of each expert."""
    copies = [1] * len(tokens)
    busiest = [(-float(count), expert) for expert, count in enumerate(tokens)]
    heapify(busiest)
    for _ in range(num_redundant):
        expert = busiest[0][1]
        copies[expert] += 1
        left = 1.0 if copies[expert] == num_ranks else -tokens[expert] / copies[expert]  # last: it is on all ranks
        heapreplace(busiest, (left, expert))
    return copies


def _put(
    expert: int, held: Sequence[set[int]], loads: list[float], room: Sequence[int], shares: Sequence[float]
) -> None:
    """Put one more copy on the rank with the fewest tokens that can take it."""
    free = [rank for rank, its in enumerate(held) if len(its) < room[rank]]
    able = [rank for rank in free if expert not in held[rank]]
    if able:
        chosen = min(able, key=lambda rank: (loads[rank], rank))
    else:
        # All ranks with room hold this expert, so a full rank gives away an expert that one of them lacks. There is
        # such an expert, because the ranks' room differs by at most one.
        chosen, given, to = min(
            ((rank, other, taker) for rank, its in enumerate(held) if expert not in its
             for taker in free for other in its - held[taker]),
            key=lambda move: (abs(shares[move[1]] - shares[expert]), loads[move[2]], move),
        )  # fmt: skip
        for rank, change in ((chosen, held[chosen].remove), (to, held[to].add)):
            change(given)
            loads[rank] += shares[given] if rank == to else -shares[given]
    held[chosen].add(expert)
    loads[chosen] += shares[expert]


def _ranks_of(num_experts: int, held: Sequence[set[int]]) -> RanksOf:
    return tuple(tuple(rank for rank, its in enumerate(held) if expert in its) for expert in range(num_experts))
