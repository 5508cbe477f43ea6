"""Attention over paged keys and values."""

from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.decoder import Attention
from penstock.gpu_worker.models.blocks.step import Step
from penstock.gpu_worker.models.linear import Linear
from penstock.kernels.qk_norm_rope_write import QKNorms


class AttentionBlock(NamedTuple):
    """See `Attention`, the description."""

    attention: Attention
    qkv: Linear  # [(Hq + 2 * Hk) * D, H]: all q heads, all k heads, all v heads
    o: Linear  # [H, Hq * D]
    norms: QKNorms
    sinks: Tensor | None  # fp32[Hq]

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]"""
        its, pages = self.attention, step.pages[layer]
        over_pages = step.attentions[pages.group]
        rotation = None if its.rope is None else step.rotations[its.rope]
        q_scale = None if its.query_growth is None else step.growths[its.query_growth]
        q = over_pages.write(self.qkv(x, step.inputs), self.norms, rotation, pages, q_scale)
        attended = over_pages.attend(
            q, pages, scale=its.scale, window=its.window, softcap=its.softcap, sinks=self.sinks
        )
        return self.o(attended.flatten(1), step.inputs)
