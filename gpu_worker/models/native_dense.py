"""The dense decoder on the CPU's own kernels: the same interface, all layers in one call."""

from torch import Tensor

from penstock.core.checkpoint.model_config import ModelConfig
from penstock.gpu_worker.models.dense import DenseLayer, DenseModel, DenseWeights, ForwardInputs, StoredWeights
from penstock.gpu_worker.models.linear import Linear
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.native.library import Library, NativeLayer, NativeShape, NativeWeights, PackedLinear

_LONG = 64
"""Tokens of a step from which on torch's bf16 products are used, where the processor has such. By this many, weights
are read once for so much arithmetic that its rate decides, not the memory's."""


class NativeDenseModel:
    """Weights in the kernels' layout, with the computation over them. Activations are fp32, whatever the weights are.

    They may be rounded to bf16 on their way into each product: see `rounds_inputs`.

    A token's hidden state has the same bits alone, in any batch, in any chunk of its prompt, and after preemption.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DenseWeights | StoredWeights,
        library: Library,
        for_long_inputs: DenseModel | None = None,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        """Packs the weights, layer by layer.

        Args:
            config: of the model.
            weights: fp32 or bf16.
            library: the kernels.
            for_long_inputs: the same model on torch's kernels, for steps of many tokens. Their bits are then others.
            rounds_inputs: as `Library.pack` has it, for all weights.
        """
        self.config = config
        self._for_long_inputs = for_long_inputs
        tied = weights.lm_head.weight is weights.embedding
        shape = NativeShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            activation=config.activation,
            eps=config.rms_norm_eps,
        )
        layers = [
            _pack_layer(layer, window, library, rounds_inputs)
            for layer, window in zip(weights.layers, config.windows, strict=True)
        ]
        packed = NativeWeights(
            embedding=None if tied else weights.embedding,
            layers=layers,
            final_norm=weights.final_norm.float(),
            lm_head=_pack(weights.lm_head, library, rounds_inputs),
        )
        self.native = library.model(shape, packed)  # which computes whole steps, too

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """As `DenseModel.forward`; fp32[T, H]."""
        if self._for_long_inputs is not None and self.needs_cpu_plan(inputs.input_ids.shape[0]):
            return self._for_long_inputs.forward(inputs, kv).float()
        return self.native.forward(
            inputs.input_ids,
            inputs.cos_sin,
            inputs.slot_mapping,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.page_table,
            kv.of_group(kv.groups[0]),
        )

    def needs_cpu_plan(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens runs on torch's kernels, which want `cpu_plan` and `cpu_cells`."""
        return self._for_long_inputs is not None and num_tokens >= _LONG

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] of the rows that sample -> fp32[S, V]"""
        return self.native.logits(hidden)


def _pack(linear: Linear, library: Library, rounds_inputs: bool, interleaved: bool = False) -> PackedLinear:
    return library.pack(linear.weight, linear.bias, interleaved=interleaved, rounds_inputs=rounds_inputs)


def _pack_layer(layer: DenseLayer, window: int | None, library: Library, rounds_inputs: bool) -> NativeLayer:
    return NativeLayer(
        input_norm=layer.input_norm.float(),
        qkv=_pack(layer.qkv, library, rounds_inputs),
        q_norm=_float(layer.q_norm),
        k_norm=_float(layer.k_norm),
        o=_pack(layer.o, library, rounds_inputs),
        mlp_norm=layer.mlp_norm.float(),
        gate_up=_pack(layer.gate_up, library, rounds_inputs, interleaved=True),
        down=_pack(layer.down, library, rounds_inputs),
        window=window,
    )


def _float(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.float()
