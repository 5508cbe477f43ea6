"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, driven by its configuration.

What the forward pass reads comes in `ForwardInputs`, and what it keeps goes into the KV pool that it is given.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.families.dense import DenseConfig
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.attention import AttentionBackend, begin_attention
from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import ForwardInputs, WholeStep
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.activation import gelu_mul, silu_mul
from penstock.kernels.rms_norm import add_rms_norm, rms_norm


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

    embedding: Embedding  # [V, H]
    layers: tuple[DenseLayer, ...]
    final_norm: Tensor  # [H]
    lm_head: Linear | None  # [V, H]; None: the embedding's


class StoredWeights(NamedTuple):
    """A model's weights on their way from its files: layers are read when they are asked for, once."""

    embedding: Embedding  # as in `DenseWeights`
    layers: Iterator[DenseLayer]
    final_norm: Tensor
    lm_head: Linear | None

    def in_memory(self) -> DenseWeights:
        """All of them."""
        return DenseWeights(self.embedding, tuple(self.layers), self.final_norm, self.lm_head)


class DenseModel:
    """See `Model`. Weights with the computation over them, on a GPU or with torch's kernels on a CPU."""

    def __init__(
        self, config: DenseConfig, weights: DenseWeights, attention: AttentionBackend = begin_attention
    ) -> None:
        self.config = config
        self.weights = weights
        self.rope = Rope(config.rope, config.head_dim)
        self._attention = attention
        self._head = weights.embedding.head() if weights.lm_head is None else weights.lm_head

    @property
    def kernels(self) -> str:
        return "triton" if self.weights.final_norm.is_cuda else "torch"

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        self.rope.prepare(device, num_rows, max_model_len)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        self.rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        residual = self.weights.embedding(inputs)
        x = rms_norm(residual, self.weights.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.weights.layers[1:]] + [self.weights.final_norm]
        scale, is_tanh = config.head_dim**-0.5, config.activation == "gelu_tanh"
        attentions = [self._attention(inputs.of_group(i), group) for i, group in enumerate(kv.groups)]
        rotation = self.rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc)
        for i, layer in enumerate(self.weights.layers):
            pages = kv.layers[i]
            attention = attentions[pages.group]
            q = attention.write(layer.qkv(x, inputs), rotation, layer.q_norm, layer.k_norm, eps, pages)
            attended = attention.attend(q, pages, scale=scale, window=config.windows[i])
            x, residual = add_rms_norm(layer.o(attended.flatten(1), inputs), residual, layer.mlp_norm, eps)
            gate_up = layer.gate_up(x, inputs)
            activated = silu_mul(gate_up) if config.activation == "silu" else gelu_mul(gate_up, is_tanh)
            x, residual = add_rms_norm(layer.down(activated, inputs), residual, next_norms[i], eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V] in the model's dtype."""
        return self._head(hidden, None)

    def whole_step(self, token_ids: Tensor, page_table: Tensor, kv: KVPool) -> WholeStep | None:
        return None
