"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, driven by its configuration.

The forward pass is a function of plain tensors: what it reads comes in `ForwardInputs`, what it keeps
goes into the KV pool that it is given.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.activation import gelu_mul, silu_mul
from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.paged_attention_cpu import CpuAttentionPlan
from penstock.kernels.qk_norm_rope_write import qk_norm_rope_write
from penstock.kernels.rms_norm import add_rms_norm, rms_norm


class ForwardInputs(NamedTuple):
    """One ragged batch (T tokens, N rows)."""

    input_ids: Tensor  # int32[T]
    rope_positions: Tensor | None  # int64[T], rows of cos_sin; None if it has a row per token
    cos_sin: Tensor  # fp32[positions or T, D]
    slot_mapping: Tensor  # int64[T]
    query_start_loc: Tensor  # int32[N + 1]
    seq_lens: Tensor  # int32[N]
    page_table: Tensor  # int32[N, max_pages]
    max_query_len: int
    max_seq_len: int
    cpu_plan: CpuAttentionPlan | None = None
    cpu_cells: Tensor | None = None  # int64[T * Hk]


class DenseLayer(NamedTuple):
    """One layer's weights (H hidden size, I intermediate size)."""

    input_norm: Tensor  # [H]
    qkv: Linear  # [(Hq + 2 * Hk) * D, H]: all q heads, all k heads, all v heads
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    o: Linear  # [H, Hq * D]
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # [2 * I, H]: gate, then up
    down: Linear  # [H, I]


class DenseWeights(NamedTuple):
    """A whole model's weights."""

    embedding: Tensor  # [V, H]
    layers: tuple[DenseLayer, ...]
    final_norm: Tensor  # [H]
    lm_head: Linear  # [V, H]; the embedding itself if tied


class StoredWeights(NamedTuple):
    """A model's weights on their way from its files: layers are read when they are asked for, once."""

    embedding: Tensor  # as in `DenseWeights`
    layers: Iterator[DenseLayer]
    final_norm: Tensor
    lm_head: Linear

    def in_memory(self) -> DenseWeights:
        """All of them."""
        return DenseWeights(self.embedding, tuple(self.layers), self.final_norm, self.lm_head)


class DenseModel:
    """Weights with the computation over them."""

    def __init__(self, config: ModelConfig, weights: DenseWeights) -> None:
        self.config = config
        self.weights = weights

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """Compute a batch.

        Args:
            inputs: the batch.
            kv: where the batch's keys and values are written, and read with those that are there.

        Returns:
            [T, H], the final hidden states, normed: what `logits` takes.
        """
        config, eps = self.config, self.config.rms_norm_eps
        residual = functional.embedding(inputs.input_ids, self.weights.embedding)
        x = rms_norm(residual, self.weights.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.weights.layers[1:]] + [self.weights.final_norm]
        scale = config.head_dim**-0.5
        for i, layer in enumerate(self.weights.layers):
            pages = kv.layers[i]
            q = qk_norm_rope_write(
                layer.qkv(x),
                inputs.rope_positions,
                inputs.cos_sin,
                layer.q_norm,
                layer.k_norm,
                eps,
                pages.keys,
                pages.values,
                inputs.slot_mapping,
                inputs.cpu_cells,
            )
            attended = paged_attention(
                q,
                pages.keys,
                pages.values,
                inputs.page_table,
                inputs.query_start_loc,
                inputs.seq_lens,
                scale=scale,
                max_query_len=inputs.max_query_len,
                max_seq_len=inputs.max_seq_len,
                window=config.windows[i],
                cpu_plan=inputs.cpu_plan,
            )
            x, residual = add_rms_norm(layer.o(attended.flatten(1)), residual, layer.mlp_norm, eps)
            gate_up = layer.gate_up(x)
            activated = silu_mul(gate_up) if config.activation == "silu" else gelu_mul(gate_up, self._is_tanh)
            x, residual = add_rms_norm(layer.down(activated), residual, next_norms[i], eps)
        return x

    def needs_cpu_plan(self, num_tokens: int) -> bool:
        """Whether a step on a CPU wants `cpu_plan` and `cpu_cells`: always, with torch's kernels."""
        return num_tokens > 0

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] of the rows that sample -> [S, V] in the model's dtype."""
        return self.weights.lm_head(hidden)

    @property
    def _is_tanh(self) -> bool:
        return self.config.activation == "gelu_tanh"
