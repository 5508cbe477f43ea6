"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, driven by its configuration.

The forward pass reads its inputs from `ForwardInputs`, and stores keys and values in the KV pool that it is given.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from penstock.core.checkpoint.families.dense import DenseConfig
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.attention import AttentionBackend, HeadNorms, begin_attention
from penstock.gpu_worker.models.linear import Embedding, Linear
from penstock.gpu_worker.models.model import ForwardInputs, WholeStep
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.activation import gated_activation
from penstock.kernels.norms import NormWeights, add_norm, norm


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
    layers: Iterable[DenseLayer]  # they may be read from files when they are iterated, once
    final_norm: Tensor  # [H]
    lm_head: Linear | None  # [V, H]; None: the embedding's


class DenseModel:
    """See `Model`. Weights and computation, on a GPU or with torch's kernels on a CPU."""

    can_be_captured = True

    def __init__(
        self, config: DenseConfig, weights: DenseWeights, attention: AttentionBackend = begin_attention
    ) -> None:
        self.config = config
        self.embedding, layers, self.final_norm, head = weights
        self.layers = tuple(layers)
        self.rope = Rope(config.rope, config.head_dim)
        self._attention = attention
        self.head = self.embedding.head() if head is None else head

    @property
    def kernels(self) -> str:
        return "triton" if self.final_norm.is_cuda else "torch"

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        self.rope.prepare(device, num_rows, max_model_len)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        if self.rope.table is None:
            self.rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        residual = self.embedding(inputs)
        x = norm(residual, NormWeights(self.layers[0].input_norm, eps))
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        scale = config.head_dim**-0.5
        attentions = [self._attention(inputs.of_group(i), group) for i, group in enumerate(kv.groups)]
        rotation = self.rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc)
        for i, layer in enumerate(self.layers):
            pages = kv.layers[i]
            attention = attentions[pages.group]
            q = attention.write(layer.qkv(x, inputs), HeadNorms(layer.q_norm, layer.k_norm, eps), rotation, pages)
            attended = attention.attend(q, pages, scale=scale, window=config.windows[i])
            x, residual = add_norm(layer.o(attended.flatten(1), inputs), residual, NormWeights(layer.mlp_norm, eps))
            activated = gated_activation(layer.gate_up(x, inputs), config.activation)
            x, residual = add_norm(layer.down(activated, inputs), residual, NormWeights(next_norms[i], eps))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V] in the model's dtype."""
        return self.head(hidden, None)

    def whole_step(self, token_ids: Tensor, page_table: Tensor, kv: KVPool) -> WholeStep | None:
        return None
