"""From a checkpoint's named tensors to the dense decoder."""

from collections.abc import Iterator

import torch

from penstock.core.checkpoint.families.dense import DenseConfig
from penstock.gpu_worker.models.dense import DenseLayer, DenseModel, DenseWeights
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.models.native_dense import NativeDenseModel
from penstock.gpu_worker.models.weights import WeightReader


def build(config: DenseConfig, reader: WeightReader) -> Model:
    """As `Family.build`."""
    library = reader.library
    if library is None:
        return DenseModel(config, read_weights(config, reader))
    computes_in_bf16 = reader.dtype == torch.bfloat16
    packed = reader._replace(dtype=torch.bfloat16 if reader.is_bf16 else reader.dtype, are_packed=True)
    return NativeDenseModel(
        config,
        read_weights(config, packed),
        library,
        rounds_inputs=computes_in_bf16 and library.multiplies_bf16,
        long_on_torch=computes_in_bf16 and library.leaves_long_steps,
    )


def read_weights(config: DenseConfig, reader: WeightReader) -> DenseWeights:
    """Read all weights, under the names that Llama's checkpoints introduced and the others adopted."""

    def layers() -> Iterator[DenseLayer]:
        for i in range(config.num_layers):
            layer = f"model.layers.{i}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            yield DenseLayer(
                input_norm=reader.tensor(f"{layer}.input_layernorm.weight"),
                qkv=reader.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
                q_norm=reader.tensor(f"{attention}.q_norm.weight") if config.qk_norm else None,
                k_norm=reader.tensor(f"{attention}.k_norm.weight") if config.qk_norm else None,
                o=reader.linear(f"{attention}.o_proj"),
                mlp_norm=reader.tensor(f"{layer}.post_attention_layernorm.weight"),
                gate_up=reader.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                down=reader.linear(f"{mlp}.down_proj"),
            )

    return DenseWeights(
        embedding=reader.embedding("model.embed_tokens", is_head=config.tied_embeddings),
        layers=layers(),
        final_norm=reader.tensor("model.norm.weight"),
        lm_head=None if config.tied_embeddings else reader.linear("lm_head"),
    )
