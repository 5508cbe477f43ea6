"""Multi-head latent attention over pages of latents."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.gpu_worker.models.blocks.step import Step
from penstock.gpu_worker.models.linear import Linear
from penstock.kernels.norms import NormWeights, norm
from penstock.models.description.decoder import LatentAttention


class IndexerBlock(NamedTuple):
    """See `Indexer`, the description."""

    q: Linear  # [Hi * Di, q_rank]
    k: Linear  # [Di, H]
    k_norm: NormWeights
    weights: Linear  # fp32 [Hi, H]


class LatentAttentionBlock(NamedTuple):
    """See `LatentAttention`, the description."""

    attention: LatentAttention
    q_a: Linear | None  # [q_rank, H]; None: `q` multiplies hidden states directly
    q_a_norm: NormWeights | None
    q: Linear  # [Hq * (nope_dim + rope_dim), q_rank]
    kv_a: Linear  # [kv_rank + rope_dim, H]
    kv_a_norm: NormWeights
    kv_b: Tensor  # [Hq, nope_dim + v_dim, kv_rank]
    o: Linear  # [H, Hq * v_dim]
    indexer: IndexerBlock | None = None

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]; this rank's summand, if there are several."""
        its, pages = self.attention, step.pages[layer]
        latents = x
        if self.q_a is not None:
            assert self.q_a_norm is not None
            latents = norm(self.q_a(x, step.inputs), self.q_a_norm)
        q = self.q(latents, step.inputs).unflatten(1, (its.num_heads, -1))
        over_pages = step.latents[pages.group]
        rotation = None if its.rope is None else step.rotations[its.rope]
        over_pages.write(self.kv_a(x, step.inputs), q, self.kv_a_norm, rotation, pages)
        if self.indexer is not None:
            assert rotation is not None
            index_k = norm(self.indexer.k(x, step.inputs), self.indexer.k_norm)
            index_q, weights = self.indexer.q(latents, step.inputs), self.indexer.weights(x.float(), step.inputs)
            over_pages.choose(torch.cat((index_q, index_k), 1), weights, its, rotation, pages)
        attended = over_pages.attend(q, self.kv_b, its, pages)
        return self.o(attended.flatten(1), step.inputs)
