"""Attention over paged keys and values."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.gpu_worker.models.blocks.norms_over_ranks import NormsOverRanks
from penstock.gpu_worker.models.blocks.step import Step
from penstock.gpu_worker.models.linear import Linear
from penstock.kernels.attention.kv_quantization import KVScales
from penstock.kernels.attention.qk_norm_rope_write import QKNorms
from penstock.models.description.decoder import Attention


class AttentionBlock(NamedTuple):
    """See `Attention`, the description."""

    attention: Attention
    qkv: Linear
    """[(Hq + 2 * Hk) * D, H]: all q heads, all k heads, all v heads; only q heads if another layer's k and v are used.
    If the output is gated, the gates, [Hq * D], follow the q heads."""
    o: Linear  # [H, Hq * D]
    norms: QKNorms
    sinks: Tensor | None  # fp32[Hq]
    kv_scales: KVScales | None = None  # the checkpoint's, if KV has the type that they are for
    norms_over_ranks: NormsOverRanks | None = None  # replace the norms of q and k

    def __call__(self, x: Tensor, step: Step, layer: int) -> Tensor:
        """[T, H] -> [T, H]; this rank's summand, if there are several."""
        its, pages = self.attention, step.pages[layer]
        over_pages = step.attentions[pages.group]
        rotation = None if its.rope is None else step.rotations[its.rope]
        q_scale = None if its.query_growth is None else step.growths[its.query_growth]
        writes = its.shares_kv_of is None
        qkv = self.qkv(x, step.inputs)
        gates = None
        if its.has_output_gate:
            q_size = its.num_heads * its.head_dim
            q, gates, kv = qkv.split((q_size, q_size, qkv.shape[1] - 2 * q_size), dim=1)
            qkv = torch.cat((q, kv), dim=1)
        if self.norms_over_ranks is not None:
            qkv = self.norms_over_ranks(qkv)
        q = over_pages.write(qkv, self.norms, rotation, pages, q_scale, writes=writes, kv_scales=self.kv_scales)
        attended = over_pages.attend(
            q, pages, scale=its.scale, window=window_of(its), softcap=its.softcap, sinks=self.sinks
        )
        attended = attended.flatten(1)
        return self.o(attended if gates is None else attended * gates.sigmoid(), step.inputs)


def window_of(attention: Attention) -> int | None:
    """The window as `paged_attention` takes it."""
    return -attention.window if attention.window is not None and attention.window_is_chunk else attention.window
