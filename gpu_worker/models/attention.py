"""Attention over the pages. Each backend decides what it plans once per step."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.state.kv_pool import LayerPages, PageGroup
from penstock.kernels.attention.kv_quantization import KVScales
from penstock.kernels.attention.paged_attention import paged_attention
from penstock.kernels.attention.paged_attention_cpu import (
    SeenWhole,
    attend_whole,
    paged_attention_cpu,
    plan_cpu_attention,
)
from penstock.kernels.attention.qk_norm_rope_write import (
    QKNorms,
    qk_norm_rope_write,
    qk_norm_rope_write_cpu,
    slot_cells,
)


class Rotation(NamedTuple):
    """The rotary angles of a step's tokens."""

    positions: Tensor | None  # int64[T], indices of rows of cos_sin; None if cos_sin has a row for each token
    cos_sin: Tensor  # fp32[positions or T, rotary_dim]: cosines, then sines


UNROTATED = (None, None)  # in place of a Rotation


class Attention(Protocol):
    """One step's attention, for all layers of a page group."""

    def write(
        self,
        qkv: Tensor,
        norms: QKNorms,
        rotation: Rotation | None,
        pages: LayerPages,
        q_scale: Tensor | None = None,
        *,
        writes: bool = True,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        """Norm and rotate q and k, and put k and v into their pages.

        Args:
            qkv: [T, (Hq + 2 * Hk) * D]: all q heads, all k heads, all v heads; may be overwritten.
            norms: those of the layer.
            rotation: that of the step; None if the layer has no rotary embedding.
            pages: those of the layer.
            q_scale: fp32[T], multiplies each token's q after everything else.
            writes: False if `qkv` has only q heads, because another layer has put k and v into these pages.
            kv_scales: the checkpoint's scales for quantized pages.

        Returns:
            q, [T, Hq, D].
        """

    def attend(
        self,
        q: Tensor,
        pages: LayerPages,
        *,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[T, Hq, D] -> [T, Hq, D], over each row's whole context or its window.

        `window`, `softcap` and `sinks` are as in `paged_attention`.
        """


AttentionBackend = Callable[[ForwardInputs, PageGroup], Attention]
"""Begins a step. It also runs inside captured graphs, so it must not wait for the device."""


def begin_attention(inputs: ForwardInputs, group: PageGroup) -> Attention:
    """The backend for the device of the inputs."""
    return TritonAttention(inputs, group) if inputs.input_ids.is_cuda else TorchAttention(inputs, group)


class TritonAttention:
    """Penstock's own kernels on a GPU. They read lengths and pages on the device, so nothing is planned."""

    def __init__(self, inputs: ForwardInputs, group: PageGroup) -> None:
        self._inputs = inputs

    def write(
        self,
        qkv: Tensor,
        norms: QKNorms,
        rotation: Rotation | None,
        pages: LayerPages,
        q_scale: Tensor | None = None,
        *,
        writes: bool = True,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        positions, cos_sin = rotation or UNROTATED
        return qk_norm_rope_write(
            qkv,
            positions,
            cos_sin,
            norms,
            pages.keys,
            pages.values,
            self._inputs.slot_mapping,
            q_scale,
            writes=writes,
            layout=pages.layout,
            kv_scales=kv_scales,
        )

    def attend(
        self,
        q: Tensor,
        pages: LayerPages,
        *,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        inputs = self._inputs
        return paged_attention(
            q,
            pages.keys,
            pages.values,
            inputs.page_table,
            inputs.query_start_loc,
            inputs.seq_lens,
            scale=scale,
            max_query_len=inputs.max_query_len,
            max_seq_len=inputs.max_seq_len,
            window=window,
            softcap=softcap,
            sinks=sinks,
            layout=pages.layout,
            paths=inputs.paths,
            last_seen=None if inputs.images is None else inputs.images.last_seen_within(window),
        )


class TorchAttention:
    """torch's kernels on a CPU. Once per step, the batch is split and its tokens' places in the pages are computed."""

    def __init__(self, inputs: ForwardInputs, group: PageGroup) -> None:
        starts, seq_lens = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
        self._plan = plan_cpu_attention(
            starts, seq_lens, inputs.page_table, group.page_size, group.num_kv_heads, inputs.paths
        )
        self._cells = slot_cells(inputs.slot_mapping, group.num_kv_heads, group.page_size)
        self._max_seq_len = inputs.max_seq_len
        self._wholes: list[SeenWhole] = []
        self._only_in_windows = inputs.images is not None and inputs.images.only_in_windows
        if inputs.images is not None:
            for its in inputs.images.wholes:
                pages = inputs.page_table[its.row].long()
                self._wholes.append(SeenWhole(its.first_token, its.begin, its.end, pages))

    def write(
        self,
        qkv: Tensor,
        norms: QKNorms,
        rotation: Rotation | None,
        pages: LayerPages,
        q_scale: Tensor | None = None,
        *,
        writes: bool = True,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        positions, cos_sin = rotation or UNROTATED
        return qk_norm_rope_write_cpu(
            qkv,
            positions,
            cos_sin,
            norms,
            pages.keys,
            pages.values,
            self._cells,
            q_scale,
            writes=writes,
            layout=pages.layout,
            kv_scales=kv_scales,
        )

    def attend(
        self,
        q: Tensor,
        pages: LayerPages,
        *,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        wholes = () if window is None and self._only_in_windows else self._wholes
        window = None if window is not None and abs(window) >= self._max_seq_len else window
        out = paged_attention_cpu(
            *(q, pages.keys, pages.values, self._plan, scale, window, softcap, sinks), layout=pages.layout
        )
        for its in wholes:
            attend_whole(q, pages.keys, pages.values, its, scale, window, softcap, sinks, out, pages.layout)
        return out
