"""Attention over paged keys and values."""

from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.decoder import Attention
from penstock.gpu_worker.models.attention import HeadNorms, Rotation
from penstock.gpu_worker.models.blocks.step import Step
from penstock.gpu_worker.models.linear import Linear
from penstock.kernels.norms import NormWeights


class AttentionBlock(NamedTuple):
    """See `Attention`, the description."""

    attention: Attention
    qkv: Linear  # [(Hq + 2 * Hk) * D, H]: all q heads, all k heads, all v heads
    o: Linear  # [H, Hq * D]
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    sinks: Tensor | None  # fp32[Hq]

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        its, pages = self.attention, step.pages[layer]
        over_pages = step.attentions[pages.group]
        rotation = Rotation(None, x.new_empty(x.shape[0], 0)) if its.rope is None else step.rotations[its.rope]
        norms = HeadNorms(_weight(self.q_norm), _weight(self.k_norm), its.q_norm.eps if its.q_norm else 0.0)
        q = over_pages.write(self.qkv(x, step.inputs), norms, rotation, pages)
        attended = over_pages.attend(
            q, pages, scale=its.scale, window=its.window, softcap=its.softcap, sinks=self.sinks
        )
        return self.o(attended.flatten(1), step.inputs)


def _weight(norm: NormWeights | None) -> Tensor | None:
    return None if norm is None else norm.weight
