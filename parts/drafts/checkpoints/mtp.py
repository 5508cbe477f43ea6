"""Layers in a model's own checkpoint that predict one more token (DeepSeek-V3, 2024; GLM-4.5).

The layer after the last, `model.layers.N`: a decoder layer like the last one over eh_proj([enorm(embedding of the next
token), hnorm(the model's last hidden state, normed)]), then shared_head.norm. Embedding and output matrix are the
model's, though checkpoints repeat them.
"""

from msgspec.structs import replace

from penstock.config.options import ConfigError
from penstock.models.description.decoder import Decoder, Entry, LatentAttention, Layer, Norm
from penstock.parts.drafts.checkpoints.head import DraftHead


def prefix(model: Decoder) -> str:
    """The beginning of the layer's names."""
    return model.names.layer.format(len(model.layers))


def ignored(model: Decoder) -> tuple[str, ...]:
    """The beginnings of names of tensors that repeat the model's own."""
    begin = prefix(model)
    return (f"{begin}embed_tokens.", f"{begin}shared_head.head.", f"{begin}self_attn.rotary_emb.")


def parse_mtp(model: Decoder) -> DraftHead:
    """Return a model's layer of this kind.

    Raises:
        ConfigError: it has none, or one that is not supported.
    """
    if not model.names.unused_layers:
        raise ConfigError(f"{model.architecture} has no layer that predicts further tokens by its config.json")
    if model.quantization is not None:
        raise ConfigError("its weights are quantized; layers that predict further tokens are read as floats")
    begin, norm = prefix(model), model.final_norm or Norm()
    return DraftHead(
        decoder=replace(
            model,
            layers=(_choosing(model.layers[-1]),),
            final_norm=None,
            tied_embeddings=False,
            has_embedding=False,
            has_head=False,
            entry=Entry(embedding_norm=norm, given_norm=norm),
            names=replace(
                model.names,
                layer=begin,
                entry_projection=f"{begin}eh_proj",
                entry_embedding_norm=f"{begin}enorm",
                entry_given_norm=f"{begin}hnorm",
            ),
        ),
        norm=norm,
        norm_name=f"{begin}shared_head.norm",
    )


def _choosing(layer: Layer) -> Layer:
    """The layer with an indexer of its own, if it would use another's."""
    mixer = layer.mixer
    if not isinstance(mixer, LatentAttention) or mixer.indexer is None:
        return layer
    return replace(layer, mixer=replace(mixer, indexer=replace(mixer.indexer, is_shared=False)))
