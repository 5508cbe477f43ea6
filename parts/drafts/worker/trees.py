"""Trees of drafts: several guesses for a position, of which at most one is right.

A row's guesses are nodes, numbered from 0. A node's parent is an earlier node, or the row's last token. Node i is
computed at the position that its path gives it. Its token, keys and values are at place start + 1 + i of the row, where
`start` is the position of the row's last token; in a chain, place and position are the same. Attention finds a node's
ancestors by its path (`paths` in `kernels/attention/paged_attention.py`), in the order of their positions. So each node
gets the same bits as if the tokens of its path were decoded one by one, and its draw is the one that a plain decode
would make.

Afterwards the right path is moved from its places to its positions. This happens at the beginning of the next step,
before the row's pages are read or reassigned. Sources for trees that one step verifies: Cai et al., "Medusa" (2024);
Miao et al., "SpecInfer" (2024). Both mask the other nodes instead; but keys in the order of places would change the
order of sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.gpu_worker.state.row_state import RowState
from penstock.kernels.attention.move_positions import move_positions
from penstock.kernels.attention.paged_attention_cpu import NO_PATH
from penstock.models.description.decoder import Attention, Decoder
from penstock.models.description.model_config import ModelConfig
from penstock.parts.drafts.worker.drafter import Guesses, Int32Array


class DraftTree(NamedTuple):
    """The guesses for one row of a batch."""

    row: int
    start: int  # position of the row's last token
    token_ids: Sequence[int]  # of each node
    parents: Sequence[int]  # -1: the row's last token

    def paths(self) -> list[list[int]]:
        """For each node: its ancestors and itself."""
        found: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            found.append([*(found[parent] if parent >= 0 else ()), node])
        return found

    def right_draws(self, drawn: Sequence[int]) -> list[int]:
        """Which draws count.

        Args:
            drawn: the token drawn after the row's last token, then after each node; negative where sampling failed.

        Returns:
            Indices into `drawn`, ascending, beginning with 0. The path ends before a failed draw (unless that is the
            first one), so that the next step reaches it again.
        """
        right = [0]
        while (token := drawn[right[-1]]) >= 0:
            last = right[-1] - 1
            nodes = zip(self.parents, self.token_ids, strict=True)
            child = next((i for i, node in enumerate(nodes) if node == (last, token)), -1)
            if child < 0 or drawn[1 + child] < 0:
                break
            right.append(1 + child)
        return right


def chain_parents(num_nodes: int) -> Int32Array:
    """int32[num_nodes]: every node follows the one before it."""
    return np.arange(-1, num_nodes - 1, dtype=np.int32)


def is_chain(parents: Int32Array) -> bool:
    """Whether every node follows the one before it."""
    return bool((parents == chain_parents(parents.shape[0])).all())


def first_path(parents: Sequence[int]) -> list[int]:
    """The chain of first children: each node is the first child of the one before."""
    nodes: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (nodes[-1] if nodes else -1):
            nodes.append(node)
    return nodes


def without_trees(guesses: Guesses, is_chained: Sequence[bool]) -> Guesses:
    """Reduce the trees of some rows (bool [D]) to chains of first children; drop `parents` if no tree is left."""
    if guesses.parents is None:
        return guesses
    ends = guesses.counts.cumsum().tolist()
    counts: list[int] = []
    kept: list[int] = []
    parents: list[Int32Array] = []
    for count, end, wanted in zip(guesses.counts.tolist(), ends, is_chained, strict=True):
        its = guesses.parents[end - count : end]
        nodes = first_path(its.tolist()) if wanted else list(range(count))
        counts.append(len(nodes))
        kept += [end - count + node for node in nodes]
        parents.append(chain_parents(len(nodes)) if wanted else its)
    has_trees = not all(is_chain(its) for its in parents)
    left = np.concatenate(parents) if has_trees else None
    return Guesses(np.array(counts, dtype=np.int32), guesses.token_ids[kept], left)


def trees_of(rows: Int32Array, start: Int32Array, guesses: Guesses) -> dict[int, DraftTree]:
    """The trees of those of D rows that have one, by index; `start`: int32[D], positions of the rows' last tokens."""
    assert guesses.parents is not None
    found: dict[int, DraftTree] = {}
    for i, (count, end) in enumerate(zip(guesses.counts.tolist(), guesses.counts.cumsum().tolist(), strict=True)):
        parents = guesses.parents[end - count : end]
        if not is_chain(parents):
            tokens = guesses.token_ids[end - count : end].tolist()
            found[i] = DraftTree(int(rows[i]), int(start[i]), tokens, parents.tolist())
    return found


def path_table(num_rows: int, trees: Sequence[tuple[int, DraftTree]]) -> Int32Array:
    """Return int32[N, 1 + D], the `paths` that attention takes for a batch.

    Args:
        num_rows: N.
        trees: each with the batch row of its first node; the other nodes are in the rows after it.
    """
    paths = [(first, tree, tree.paths()) for first, tree in trees]
    depth = max(len(path) for _, _, its in paths for path in its)
    table = np.zeros((num_rows, 1 + depth), dtype=np.int32)
    table[:, 0] = NO_PATH
    for first, tree, its in paths:
        for node, path in enumerate(its):
            table[first + node, 0] = tree.start + 1
            table[first + node, 1 : 1 + len(path)] = [tree.start + 1 + ancestor for ancestor in path]
    return table


def positions_of(places: Int32Array, paths: Int32Array) -> Int32Array:
    """int32[N], the positions of the tokens at these places, by the `path_table` of a batch."""
    depths = (paths[:, 1:] > 0).sum(axis=1)  # 0 is padding: place 0 is before any tree
    return np.where(paths[:, 0] == NO_PATH, places, paths[:, 0] + depths - 1).astype(np.int32)


def why_no_trees(config: ModelConfig) -> str:
    """What keeps a model from computing trees; empty if nothing does."""
    if not isinstance(config, Decoder):
        return "transformers' code computes this model, and it knows chains only"
    if config.shard is not None and config.shard.place.num_stages > 1:
        return "stages of a pipeline know chains only"
    if any(not isinstance(layer.mixer, Attention) for layer in config.layers):
        return "latent attention knows chains only"
    return ""


class Moves:
    """Moves to be made before the next step: right paths, and the tokens that were drawn on them."""

    def __init__(self, state: RowState, kv: KVPool, device: Device) -> None:
        self._state, self._kv, self._device = state, kv, device
        self._moved: list[tuple[int, int, int]] = []  # row, place, position
        self._drawn: list[tuple[int, int, int]] = []  # row, position, token

    def __bool__(self) -> bool:
        return bool(self._drawn)

    def add(self, tree: DraftTree, right: Sequence[int], drawn: Sequence[int]) -> None:
        """Record the draws of a tree that count: `right` are indices into `drawn`, which has all draws of the tree."""
        for i, draw in enumerate(right):
            if draw != i:
                self._moved.append((tree.row, tree.start + draw, tree.start + i))
            self._drawn.append((tree.row, tree.start + 1 + i, max(0, drawn[draw])))

    def apply(self) -> tuple[Int32Array, Int32Array, Int32Array] | None:
        """Make the moves; return rows, sources and targets, int32[M] each, or None if there is nothing to report."""
        state, kv = self._state, self._kv
        rows, positions, tokens = np.array(self._drawn, dtype=np.int32).T
        state.write_tokens(rows, positions, np.ones_like(rows), tokens.tobytes())
        self._drawn.clear()
        if not self._moved:
            return None
        moved = np.array(self._moved, dtype=np.int32).T.copy()
        self._moved.clear()
        on_device = self._device.upload(moved)
        tables = [state.page_table, *(table for table, _ in state.window_tables)]
        for group, table in zip(kv.groups, tables, strict=True):
            move_positions(kv.of_group(group), kv.layout_of(group), table, group.page_size, *on_device.unbind(0))
        return moved[0], moved[1], moved[2]

    def clear(self) -> None:
        """Forget all."""
        self._moved.clear()
        self._drawn.clear()
