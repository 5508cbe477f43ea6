"""Converts GGUF's tensors to transformers': renames them, and undoes what llama.cpp's converter did.

The model's description has transformers' name of each weight (`Names`), and its shape. A GGUF tensor that holds several
weights (all experts, or q, k and v) is cut by rows, which works for every type.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from penstock.models.description.decoder import Attention, Decoder, Experts
from penstock.models.description.names import Names
from penstock.models.files.source import StoredTensor
from penstock.models.gguf.architectures import Architecture
from penstock.models.gguf.block_types import FLOATS
from penstock.models.parsing.family import Shape
from penstock.models.weights.decoder import decoder_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that hold settings, which `rope.py` reads."""

_OF_LAYERS: dict[str, Callable[[Names], str | tuple[str, ...]]] = {
    "attn_norm": lambda names: names.mixer_norm,
    "ffn_norm": lambda names: names.mlp_norm,
    "post_attention_norm": lambda names: names.post_mixer_norm or names.mlp_norm,
    "post_ffw_norm": lambda names: names.post_mlp_norm,
    "attn_q": lambda names: names.qkv[0] if len(names.qkv) > 1 else names.q,
    "attn_k": lambda names: names.qkv[1],
    "attn_v": lambda names: names.qkv[2],
    "attn_qkv": lambda names: names.qkv,
    "attn_output": lambda names: names.o,
    "attn_q_norm": lambda names: names.q_norm,
    "attn_k_norm": lambda names: names.k_norm,
    "attn_sinks": lambda names: names.sinks,
    "attn_q_a": lambda names: names.q_a,
    "attn_q_a_norm": lambda names: names.q_a_norm,
    "attn_q_b": lambda names: names.q_b,
    "attn_kv_a_mqa": lambda names: names.kv_a,
    "attn_kv_a_norm": lambda names: names.kv_a_norm,
    "attn_kv_b": lambda names: names.kv_b,
    "attn_k_b": lambda names: names.k_b,
    "attn_v_b": lambda names: names.v_b,
    "ffn_gate": lambda names: names.gate_up[0],
    "ffn_up": lambda names: names.gate_up[-1],
    "ffn_down": lambda names: names.down,
    "ffn_gate_inp": lambda names: names.router,
    "exp_probs_b": lambda names: names.correction,
    "ffn_gate_exps": lambda names: names.expert_gate_up[0],
    "ffn_up_exps": lambda names: names.expert_gate_up[1],
    "ffn_gate_up_exps": lambda names: names.expert_gate_up,
    "ffn_down_exps": lambda names: names.expert_down,
    "ffn_gate_shexp": lambda names: names.shared_gate_up[0],
    "ffn_up_shexp": lambda names: names.shared_gate_up[1],
    "ffn_down_shexp": lambda names: names.shared_down,
    "ffn_gate_inp_shexp": lambda names: names.shared_gate,
}
"""GGUF's name of each part of a layer -> its field in `Names`."""
_OTHERS: dict[str, Callable[[Names], str]] = {
    "token_embd": lambda names: names.embedding,
    "position_embd": lambda names: names.positions,
    "output_norm": lambda names: names.final_norm,
    "output": lambda names: names.head,
}
_WITHOUT_ENDING = ("attn_sinks", "exp_probs_b")


def transformers_tensors(
    stored: Mapping[str, StoredTensor], decoder: Decoder, architecture: Architecture
) -> dict[str, StoredTensor]:
    """Return the tensors by transformers' names. Unknown tensors keep their names.

    Args:
        stored: by GGUF's names.
        decoder: the description from the metadata.
        architecture: the file's.
    """
    expected = decoder_tensors(decoder)
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if name in _ROTARY:
            continue
        leaf, names = _names(name, decoder)
        if architecture.pairs_are_neighbours and leaf in ("attn_q", "attn_k"):
            tensor = _in_halves(tensor, leaf, decoder)
        elif architecture.norm_offset and leaf.endswith("norm"):
            tensor = _shifted(tensor, -architecture.norm_offset)
        found |= zip(names, _cut(tensor, [expected.get(each) for each in names]), strict=False)
    return found


def transformers_rows(
    name: str, rows: StoredTensor, decoder: Decoder, architecture: Architecture
) -> dict[str, StoredTensor]:
    """Return rows that belong to a matrix's outputs, by transformers' names of the matrices that they belong to.

    Args:
        name: GGUF's, of the matrix; an unknown one is kept.
        rows: [outputs, any number], in GGUF's order.
        decoder: as in `transformers_tensors`, as `architecture`.
    """
    try:
        leaf, names = _names(name, decoder)
    except IndexError:
        names = []
    if not names:  # it is part of another tensor in this architecture, or of experts that the model does not have
        return {name: rows}
    if architecture.pairs_are_neighbours and leaf in ("attn_q", "attn_k"):
        rows = _in_halves(rows, leaf, decoder)
    expected = decoder_tensors(decoder)
    shapes = [expected.get(each) for each in names]
    pieces = [None if shape is None else (shape[0], *rows.shape[1:]) for shape in shapes] if len(names) > 1 else [None]
    return dict(zip(names, _cut(rows, pieces), strict=False))


def _in_halves(tensor: StoredTensor, leaf: str, decoder: Decoder) -> StoredTensor:
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, Attention)
    return _halves(tensor, mixer.num_heads if leaf == "attn_q" else mixer.num_kv_heads)


def _names(name: str, decoder: Decoder) -> tuple[str, list[str]]:
    """Return the part of the name that says its kind, and the names of all weights that the tensor holds, in order."""
    names = decoder.names
    if (match := _LAYER.fullmatch(name)) is None:
        leaf, _, ending = name.rpartition(".")
        named = _OTHERS.get(leaf)
        return leaf, [name if named is None else f"{named(names)}.{ending}"]
    number, leaf, ending = int(match[1]), match[2], match[3]
    prefix = names.layer.format(number)
    if number >= len(decoder.layers):
        return leaf, [f"{prefix}{leaf}.{ending}"]
    of_layer = _OF_LAYERS.get(leaf)
    if of_layer is None:
        return leaf, [name]
    parts = of_layer(names)
    parts = (parts,) if isinstance(parts, str) else parts
    if "{}" in parts[0]:
        mlp, mixer = decoder.layers[number].mlp, decoder.layers[number].mixer
        if isinstance(mixer, Attention) and leaf in ("attn_q_norm", "attn_k_norm"):
            count = mixer.num_heads if leaf == "attn_q_norm" else mixer.num_kv_heads
        else:
            count = mlp.count if isinstance(mlp, Experts) else 0
        parts = tuple(part.format(i) for i in range(count) for part in parts)
    return leaf, [prefix + part + ("" if leaf in _WITHOUT_ENDING else f".{ending}") for part in parts]


def _cut(tensor: StoredTensor, shapes: Sequence[Shape | None]) -> Iterator[StoredTensor]:
    """Yield consecutive pieces of the tensor with these shapes; the whole tensor if they do not fit."""
    pieces = [shape for shape in shapes if shape is not None]
    are_rows = all(shape[-1] == tensor.shape[-1] for shape in pieces) or tensor.dtype in FLOATS
    if len(pieces) < len(shapes) or sum(map(prod, pieces)) != tensor.num_elements or not are_rows:
        yield tensor
        return
    begin = 0
    for shape in pieces:
        num_bytes = prod(shape) * tensor.num_bytes // tensor.num_elements
        # A transposed matrix has as many numbers: keep its wrong shape visible.
        is_turned = len(pieces) == 1 and len(shape) == len(tensor.shape)
        yield StoredTensor(
            tensor.shape if is_turned else shape, tensor.dtype, num_bytes, _piece(tensor, begin, begin + num_bytes)
        )
        begin += num_bytes


def _piece(tensor: StoredTensor, begin: int, end: int) -> Callable[[], memoryview]:
    return lambda: tensor.read()[begin:end]


def _halves(tensor: StoredTensor, num_heads: int) -> StoredTensor:
    """Reorder rows of q or k: in each head, the first rows of all pairs come before the second ones."""
    num_pairs = tensor.shape[0] // num_heads // 2
    if tensor.shape[0] != num_heads * num_pairs * 2:
        return tensor
    size, row_bytes = 2 * num_pairs, tensor.num_bytes // tensor.shape[0]

    def read_rows(begin: int, end: int) -> memoryview:
        first, last = begin // size * size, -(-end // size) * size  # whole heads
        heads = tensor._replace(read=lambda: tensor.read()[first * row_bytes : last * row_bytes])
        turned = _changed(heads, "uint8", lambda data: data.reshape(-1, num_pairs, 2, row_bytes).swapaxes(1, 2))
        return turned.read()[(begin - first) * row_bytes : (end - first) * row_bytes]

    return tensor._replace(read=lambda: read_rows(0, tensor.shape[0]), read_rows=read_rows)


def _shifted(tensor: StoredTensor, by: float) -> StoredTensor:
    return _changed(tensor, "float32", lambda data: data + data.dtype.type(by)) if tensor.dtype == "F32" else tensor


def _changed(tensor: StoredTensor, dtype: str, change: "Callable[[NDArray[Any]], NDArray[Any]]") -> StoredTensor:
    """Return the tensor with its bytes changed when they are read."""

    def read() -> memoryview:
        import numpy as np  # only needed for reading weights

        return np.ascontiguousarray(change(np.frombuffer(tensor.read(), dtype))).reshape(-1).view(np.uint8).data

    return tensor._replace(read=read)
