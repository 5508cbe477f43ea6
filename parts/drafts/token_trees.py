"""Trees of guesses for heads that each guess a token further ahead: which of their likeliest tokens follow which."""

import ast
from heapq import heappop, heappush
from math import prod

TokenPath = tuple[int, ...]
"""A node: of each head up to its depth, the rank of the head's token; (0,) is the first head's likeliest."""

LIKELIEST = "likeliest"
"""In place of a tree: as many nodes as are guessed, those whose paths are most probably right."""

_MOST_NODES = 64


def token_tree(text: str, num_nodes: int, depth: int) -> tuple[TokenPath, ...]:
    """Read a tree, or make the likeliest one.

    Args:
        text: a list of paths, such as "[(0,), (1,), (0, 0)]", or `LIKELIEST`.
        num_nodes: of the likeliest one.
        depth: of the likeliest one, at most.

    Returns:
        The nodes, likeliest first, so that the first few are a good smaller tree. Parents come before children.

    Raises:
        ValueError: what is wrong with it.
    """
    if text == LIKELIEST:
        return _likeliest(num_nodes, depth)
    try:
        nodes = [tuple(node) for node in ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError):
        raise ValueError(f"speculative_token_tree {text!r}: neither {LIKELIEST!r} nor a list of tuples") from None
    if not nodes or len(nodes) > _MOST_NODES or len(set(nodes)) != len(nodes):
        raise ValueError(f"speculative_token_tree must have 1 to {_MOST_NODES} nodes, all different")
    for node in nodes:
        if not node or not all(isinstance(rank, int) and 0 <= rank < _MOST_NODES for rank in node):
            raise ValueError(f"speculative_token_tree has a node {node}: ranks are from 0 to {_MOST_NODES - 1}")
        if len(node) > 1 and node[:-1] not in nodes:
            raise ValueError(f"speculative_token_tree has a node {node}, but not its parent {node[:-1]}")
    return tuple(sorted(nodes, key=lambda node: (-_share(node), len(node), node)))


def parents_of(nodes: tuple[TokenPath, ...]) -> tuple[int, ...]:
    """Of each node its parent's index; -1: it has none."""
    places = {node: i for i, node in enumerate(nodes)}
    return tuple(places.get(node[:-1], -1) for node in nodes)


def _share(node: TokenPath) -> float:
    """How often all of a path are right: an estimate. Heads' first tokens are right for 0.6 of the positions, less so
    further ahead, and later ranks as the inverse of their square (the shape of figure 4 in Cai et al., "Medusa")."""
    return prod(0.6 * 0.8**ahead / (1 + rank) ** 2 for ahead, rank in enumerate(node))


def _likeliest(num_nodes: int, depth: int) -> tuple[TokenPath, ...]:
    nodes: list[TokenPath] = []
    ahead: list[tuple[float, TokenPath]] = [(-_share((0,)), (0,))]
    while len(nodes) < num_nodes:
        node = heappop(ahead)[1]
        nodes.append(node)
        for after in ((*node[:-1], node[-1] + 1), (*node, 0)):
            if len(after) <= depth:
                heappush(ahead, (-_share(after), after))
    return tuple(nodes)
