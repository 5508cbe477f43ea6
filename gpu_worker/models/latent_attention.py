"""Latent attention over the pages of a step. How each row attends is planned once for all layers."""

from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_worker.devices.device import IntArray
from penstock.gpu_worker.models.attention import Rotation
from penstock.gpu_worker.models.model import ForwardInputs
from penstock.gpu_worker.state.kv_pool import LayerPages, PageGroup
from penstock.kernels.attention.paged_attention_cpu import CpuAttentionPlan, plan_cpu_attention
from penstock.kernels.attention.qk_norm_rope_write import (
    QKNorms,
    qk_norm_rope_write,
    qk_norm_rope_write_cpu,
    slot_cells,
)
from penstock.kernels.latents.attention import (
    chosen_latent_attention,
    expanded_attention,
    expanding_pays,
    latent_attention,
    latent_attention_cpu,
)
from penstock.kernels.latents.choice import MOST_SCORES, Choice, choose, keep_index_keys
from penstock.kernels.latents.write import latent_write, latent_write_cpu
from penstock.kernels.norms import NormWeights
from penstock.models.description.decoder import Decoder, LatentAttention
from penstock.models.description.model_config import ModelConfig

_EXPANDED = 1 << 26  # limit for expanded keys and values at once, in numbers; it decides how many heads go together
_CONTEXTS = 1 << 17  # limit for positions that are gathered at once, unless a single row has more


def scratch_numbers(key_dim: int) -> int:
    """The most numbers that expanding needs besides activations, for pages with `key_dim` numbers a position."""
    return _EXPANDED + _CONTEXTS * key_dim


def choice_numbers(config: ModelConfig) -> int:
    """The most fp32 numbers that choosing positions needs: scores, and a copy that finds the highest."""
    mixers = (its for _, its in config.attentions) if isinstance(config, Decoder) else ()
    return 2 * MOST_SCORES * any(isinstance(its, LatentAttention) and its.indexer is not None for its in mixers)


class Absorbed(NamedTuple):
    """Consecutive rows whose queries are projected into the latent space."""

    tokens: slice  # of the step's
    rows: ForwardInputs  # only their lengths and pages matter
    cpu_plan: CpuAttentionPlan | None


class Chosen(NamedTuple):
    """Tokens that attend to what an indexer chose for them, the absorbed way."""

    tokens: slice
    rows: ForwardInputs


class Expanded(NamedTuple):
    """Consecutive rows whose contexts are expanded to each head's keys and values."""

    tokens: slice
    rows: ForwardInputs
    slots: Tensor  # int64[S], the slots of all positions of their contexts, one context after the other
    key_start_loc: Tensor  # int32[N + 1]


class _Sizes(NamedTuple):
    """What a step's plan depends on. Layers that have the same share the plan."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    top_k: int  # of an indexer; 0: there is none

    def way_of(self, num_new: int, length: int) -> type[Absorbed | Expanded | Chosen]:
        """How a row with so many new tokens attends to its context of this length."""
        if self.top_k and length > self.top_k:
            return Chosen
        return Expanded if expanding_pays(num_new, length, *self[:4]) else Absorbed


def _sizes_of(its: LatentAttention) -> _Sizes:
    top_k = 0 if its.indexer is None else its.indexer.top_k
    return _Sizes(its.kv_rank, its.rope_dim, its.nope_dim, its.v_dim, top_k)


class LatentPages:
    """One step's attention over the pages of latents, for all layers of a page group."""

    def __init__(self, inputs: ForwardInputs, group: PageGroup) -> None:
        self._inputs = inputs
        self._page_size = group.page_size
        self._plan = cache(self._make_plan)
        self._choices: list[Choice] = []  # of the last layer with an indexer, for each `Chosen` of the plan

    def write(self, kv: Tensor, q: Tensor, norm: NormWeights, rotation: Rotation | None, pages: LayerPages) -> None:
        """As `latent_write`."""
        assert norm.weight is not None
        positions, cos_sin = (None, None) if rotation is None else (rotation.positions, rotation.cos_sin)
        args = (kv, q, positions, cos_sin, norm.weight, norm.eps, pages.keys)
        if kv.is_cuda:
            latent_write(*args, self._inputs.slot_mapping)
        else:
            latent_write_cpu(*args, self._cells)

    def choose(
        self, heads: Tensor, weights: Tensor, its: LatentAttention, rotation: Rotation, pages: LayerPages
    ) -> None:
        """Keep index keys, and choose what the tokens attend to in this layer, and in those that share its choice.

        Args:
            heads: [T, (Hi + 1) * Di]: index queries, then the index key, not rotated yet.
            weights: fp32 [T, Hi], of the heads.
            its: the description of the attention, with an indexer.
            rotation: of queries and keys.
            pages: those of the layer.
        """
        inputs, indexer = self._inputs, its.indexer
        assert indexer is not None
        unused = pages.keys[..., -indexer.head_dim :]  # nothing is written yet
        args = (heads, rotation.positions, rotation.cos_sin, QKNorms(), unused, unused)
        if heads.is_cuda:
            turned = qk_norm_rope_write(*args, inputs.slot_mapping, writes=False)
        else:
            turned = qk_norm_rope_write_cpu(*args, self._cells, writes=False)
        q, k = turned[:, :-1], turned[:, -1]
        keep_index_keys(k, pages.keys, inputs.slot_mapping)
        weights = weights * (indexer.num_heads * indexer.head_dim) ** -0.5
        self._choices = [
            choose(
                q[part.tokens],
                weights[part.tokens],
                pages.keys,
                part.rows.page_table,
                part.rows.query_start_loc,
                part.rows.seq_lens,
                top_k=indexer.top_k,
                max_seq_len=part.rows.max_seq_len,
            )
            for part in self._plan(_sizes_of(its))
            if isinstance(part, Chosen)
        ]

    def attend(self, q: Tensor, kv_b: Tensor, its: LatentAttention, pages: LayerPages) -> Tensor:
        """Attend over each row's whole context.

        Args:
            q: [T, Hq, nope_dim + rope_dim], rotated.
            kv_b: [Hq, nope_dim + v_dim, kv_rank], expands latents to keys and values.
            its: the description of the attention.
            pages: those of the layer.

        Returns:
            [T, Hq, v_dim].
        """
        out, choices = q.new_empty(*q.shape[:2], its.v_dim), iter(self._choices)
        for part in self._plan(_sizes_of(its)):
            of_part = q[part.tokens], kv_b, its, pages.keys
            if isinstance(part, Expanded):
                _expand(*of_part, part, out[part.tokens])
            else:
                _absorb(*of_part, next(choices) if isinstance(part, Chosen) else part, out[part.tokens])
        return out

    @cached_property
    def _cells(self) -> Tensor:
        return slot_cells(self._inputs.slot_mapping, 1, self._page_size)

    def _make_plan(self, sizes: _Sizes) -> list[Absorbed | Expanded | Chosen]:
        """Choose the cheapest way for each row. Where the host knows no lengths, all rows go the same way."""
        inputs = self._inputs
        if inputs.host_lens is None:
            return [Chosen(slice(None), inputs) if sizes.top_k else self._absorbed(slice(None), inputs)]
        lens = list(zip(*(column.tolist() for column in inputs.host_lens), strict=True))
        ways = [sizes.way_of(num_new, length) for num_new, length in lens]
        parts: list[Absorbed | Expanded | Chosen] = []
        row = first_token = 0
        while row < len(lens):
            way, end, num_tokens, num_positions = ways[row], row, 0, 0
            while end < len(lens) and ways[end] is way:
                num_new, length = lens[end]
                if way is Expanded and end > row and num_positions + length > _CONTEXTS:
                    break
                num_tokens, num_positions, end = num_tokens + num_new, num_positions + length, end + 1
            tokens, some = slice(first_token, first_token + num_tokens), _some_rows(inputs, row, end, first_token)
            if way is Expanded:
                parts.append(self._expanded(tokens, some, inputs.host_lens[1][row:end]))
            else:
                parts.append(Chosen(tokens, some) if way is Chosen else self._absorbed(tokens, some))
            row, first_token = end, first_token + num_tokens
        return parts

    def _absorbed(self, tokens: slice, rows: ForwardInputs) -> Absorbed:
        if rows.seq_lens.is_cuda:
            return Absorbed(tokens, rows, None)
        starts, seq_lens = rows.query_start_loc.tolist(), rows.seq_lens.tolist()
        return Absorbed(tokens, rows, plan_cpu_attention(starts, seq_lens, rows.page_table, self._page_size, 1))

    def _expanded(self, tokens: slice, rows: ForwardInputs, lengths: IntArray) -> Expanded:
        size, starts = self._page_size, np.zeros(len(lengths) + 1, dtype=np.int32)
        lengths.cumsum(out=starts[1:])
        # A blocking copy would wait for the steps before.
        key_start_loc = torch.from_numpy(starts).to(rows.seq_lens.device, non_blocking=True)
        position = torch.arange(int(starts[-1]), dtype=torch.int32, device=key_start_loc.device)
        row = torch.searchsorted(key_start_loc, position, right=True) - 1
        position -= key_start_loc[row]
        slots = rows.page_table[row, position // size].long() * size + position % size
        return Expanded(tokens, rows, slots, key_start_loc)


def _some_rows(inputs: ForwardInputs, begin: int, end: int, first_token: int) -> ForwardInputs:
    """The lengths and pages of some rows. They are copied, because other alignments would need kernels of their own."""
    if end - begin == inputs.seq_lens.shape[0]:
        return inputs
    assert inputs.host_lens is not None
    num_new, seq_lens = (column[begin:end] for column in inputs.host_lens)
    return inputs._replace(
        query_start_loc=inputs.query_start_loc[begin : end + 1] - first_token,
        seq_lens=inputs.seq_lens[begin:end].clone(),
        page_table=inputs.page_table[begin:end].clone(),
        max_query_len=int(num_new.max()),
        max_seq_len=int(seq_lens.max()),
    )


def _absorb(q: Tensor, kv_b: Tensor, its: LatentAttention, pages: Tensor, part: Absorbed | Choice, out: Tensor) -> None:
    rank, nope_dim = its.kv_rank, its.nope_dim
    absorbed = q.new_empty(*q.shape[:2], rank + its.rope_dim)
    absorbed[..., :rank] = torch.bmm(q[..., :nope_dim].transpose(0, 1), kv_b[:, :nope_dim]).transpose(0, 1)
    absorbed[..., rank:] = q[..., nope_dim:]
    if isinstance(part, Choice):
        means = chosen_latent_attention(absorbed, pages, part, kv_rank=rank, scale=its.scale)
    elif part.cpu_plan is not None:
        means = latent_attention_cpu(absorbed, pages, part.cpu_plan, rank, its.scale)
    else:
        rows = part.rows
        means = latent_attention(
            absorbed,
            pages,
            rows.page_table,
            rows.query_start_loc,
            rows.seq_lens,
            kv_rank=rank,
            scale=its.scale,
            max_query_len=rows.max_query_len,
            max_seq_len=rows.max_seq_len,
        )
    out.copy_(torch.bmm(means.transpose(0, 1), kv_b[:, nope_dim:].transpose(1, 2)).transpose(0, 1))


def _expand(q: Tensor, kv_b: Tensor, its: LatentAttention, pages: Tensor, part: Expanded, out: Tensor) -> None:
    """Expand and attend for some heads at a time, so that memory is bounded."""
    entries = pages.view(-1, pages.shape[-1]).index_select(0, part.slots)
    latents, rotated = entries[:, : its.kv_rank], entries[:, its.kv_rank : its.key_dim]
    count = max(1, _EXPANDED // (entries.shape[0] * kv_b.shape[1]))
    for first in range(0, its.num_heads, count):
        heads = slice(first, first + count)
        kv = functional.linear(latents, kv_b[heads].flatten(0, 1)).view(entries.shape[0], -1, kv_b.shape[1])
        expanded_attention(
            q[:, heads],
            kv,
            rotated,
            part.rows.query_start_loc,
            part.key_start_loc,
            scale=its.scale,
            max_query_len=part.rows.max_query_len,
            out=out[:, heads],
        )
