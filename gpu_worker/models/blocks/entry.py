"""The input of a head that guesses tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.kernels.norms import NormWeights, norm
from penstock.models.description.decoder import Entry


class EntryBlock(NamedTuple):
    """See `Entry`, the description."""

    entry: Entry
    embedding_norm: NormWeights | None
    given_norm: NormWeights | None
    projection: Linear | None

    def __call__(self, embedded: Tensor, given: Tensor, step: ForwardInputs) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H]; and the first mixer's input if that is another one, [T, 2 * H], else None."""
        normed = given if self.given_norm is None else norm(given, self.given_norm)
        if self.embedding_norm is not None:
            embedded = norm(embedded, self.embedding_norm)
        pair = torch.cat((normed, embedded) if self.entry.given_is_first else (embedded, normed), dim=1)
        if self.projection is not None:
            return self.projection(pair, step), None
        return normed if self.entry.is_residual else given, pair
