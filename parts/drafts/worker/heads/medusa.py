"""Medusa's heads: each guesses a token further ahead, all from the model's hidden state of the last position."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.loading.stored import as_tensor
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.ahead import Target
from penstock.ipc.messages import StepPlan
from penstock.models.check import ModelTensors
from penstock.models.weights.sources import LinearSource
from penstock.parts.drafts.checkpoints.medusa import Medusa
from penstock.parts.drafts.token_trees import TokenPath, parents_of
from penstock.parts.drafts.worker.drafter import Drafter, Guesses, Int32Array, Traits
from penstock.parts.drafts.worker.draws import draw
from penstock.parts.drafts.worker.heads.hidden_states import HiddenStates
from penstock.parts.drafts.worker.heads.matrix import Matrix, TokenMap
from penstock.parts.drafts.worker.heads.weights import head_reader, read_matrix


class MedusaHeadWeights(NamedTuple):
    """See `MedusaHead`."""

    blocks: tuple[Matrix, ...]
    output: Matrix | None


class MedusaWeights(NamedTuple):
    """All heads, loaded."""

    heads: tuple[MedusaHeadWeights, ...]
    token_map: TokenMap | None


def load_medusa(medusa: Medusa, tensors: ModelTensors, target: Target) -> MedusaWeights:
    """Read the weights."""
    reader = head_reader(tensors, target)

    @cache  # heads may share an output matrix
    def matrix(source: LinearSource) -> Matrix:
        return read_matrix(source, reader, target)

    heads = tuple(
        MedusaHeadWeights(
            tuple(matrix(block) for block in head.blocks), None if head.output is None else matrix(head.output)
        )
        for head in medusa.heads
    )
    if medusa.token_map is None:
        return MedusaWeights(heads, None)
    ids = as_tensor(tensors.stored[medusa.token_map.names[0]])
    ids = ids.to(target.device.torch_device, torch.int64)
    return MedusaWeights(heads, TokenMap(ids, target.model_config.vocab_size))


class MedusaDrafter(Drafter):
    """See `Drafter`."""

    def __init__(
        self,
        weights: MedusaWeights,
        state: RowState,
        model: Model,
        device: Device,
        kept: HiddenStates,
        tree: tuple[TokenPath, ...] = (),
    ) -> None:
        """`tree`: the nodes to guess, likeliest first; empty: a chain."""
        self._tree, self._parents = tree, np.array(parents_of(tree), dtype=np.int32)
        self.traits = Traits(guesses_trees=bool(tree), wants_hidden=True)
        self._weights = weights
        self._state = state
        self._model = model
        self._device = device
        self._kept = kept

    def apply(self, plan: StepPlan) -> None:
        """See `Drafter`."""
        if plan.new_rows:
            self._kept.forget(np.array([new.row for new in plan.new_rows], dtype=np.int32))

    def computed(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor | None) -> None:
        """Keep each row's last hidden states."""
        assert hidden is not None
        self._kept.keep_last(rows, start, num_new, hidden)

    def guess(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> Guesses:
        """See `Drafter`."""
        is_kept = self._kept.has(rows, positions - 1)
        counts = np.where(is_kept, most, 0).astype(np.int32)
        if self._tree:
            return self._guess_trees(rows, positions, np.minimum(counts, len(self._tree)))
        asked = np.flatnonzero(counts)
        tokens = np.zeros((rows.shape[0], int(counts.max(initial=0))), dtype=np.int32)
        hidden = self._kept.of(rows[asked], positions[asked] - 1)
        downloads = []
        for number in range(tokens.shape[1]):
            left = np.flatnonzero(counts[asked] > number)
            if left.shape[0] < asked.shape[0]:
                hidden, asked = hidden.index_select(0, self._device.upload(left)), asked[left]
            drawn = draw(
                self._logits(number, hidden), rows[asked], positions[asked] + 1 + number, self._state, self._device
            )
            downloads.append((asked, self._device.download(drawn)))
        for number, (places, download) in enumerate(downloads):
            tokens[places, number] = np.frombuffer(download.wait(), dtype=np.int32)
        return Guesses(counts, tokens[np.arange(tokens.shape[1]) < counts[:, None]])

    def _guess_trees(self, rows: Int32Array, positions: Int32Array, counts: Int32Array) -> Guesses:
        """The first nodes of the tree for each row. Each head's draw comes first, then its likeliest other tokens."""
        asked, nodes = np.flatnonzero(counts), self._tree[: int(counts.max(initial=0))]
        if not nodes:
            return Guesses(counts, counts[:0])
        hidden = self._kept.of(rows[asked], positions[asked] - 1)
        downloads = []
        for number in range(max(map(len, nodes))):
            num_ranks = 1 + max(node[number] for node in nodes if len(node) > number)
            logits = self._logits(number, hidden)
            likeliest = logits.topk(min(num_ranks, logits.shape[1]), dim=1).indices.int()
            drawn = draw(logits, rows[asked], positions[asked] + 1 + number, self._state, self._device)
            downloads.append((self._device.download(drawn), self._device.download(likeliest.flatten())))
        chosen = []  # for each head, the tokens of each row
        for of_drawn, of_likeliest in downloads:
            first = np.frombuffer(of_drawn.wait(), dtype=np.int32).tolist()
            others = np.frombuffer(of_likeliest.wait(), dtype=np.int32).reshape(asked.shape[0], -1).tolist()
            chosen.append([[token, *(o for o in its if o != token)] for token, its in zip(first, others, strict=True)])
        tokens = np.array(
            [[chosen[len(node) - 1][i][node[-1]] for node in nodes] for i in range(asked.shape[0])], dtype=np.int32
        )
        is_guessed = np.arange(len(nodes)) < counts[asked][:, None]
        parents = np.broadcast_to(self._parents[: len(nodes)], tokens.shape)
        return Guesses(counts, tokens[is_guessed], parents[is_guessed])

    def moved(self, rows: Int32Array, sources: Int32Array, targets: Int32Array) -> None:
        """See `Drafter`."""
        self._kept.move(rows, sources, targets)

    def _logits(self, number: int, hidden: Tensor) -> Tensor:
        """[S, V] of one head."""
        head = self._weights.heads[number]
        for block in head.blocks:
            hidden = hidden + functional.silu(block(hidden))
        if head.output is None:
            return self._model.logits(hidden)
        logits = head.output(hidden)
        return logits if self._weights.token_map is None else self._weights.token_map(logits)

    def clear(self) -> None:
        """Forget all rows."""
        self._kept.forget(slice(None))
