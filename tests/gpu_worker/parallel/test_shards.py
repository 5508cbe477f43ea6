"""What ranks read of every family's tensors: put together it is the whole, and what belongs together is on one rank."""

import math
from typing import Any

import numpy as np
import pytest
import transformers
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.config import ConfigError
from penstock.config.ranks import Place
from penstock.models.description.decoder import Attention, Decoder, DenseMLP, Experts, LatentAttention
from penstock.models.families.registry import parse_model_config
from penstock.models.shards.shard import shard_of
from penstock.models.shards.sources import sources_of
from penstock.models.weights.decoder import (
    AttentionSources,
    ExpertsSources,
    LatentSources,
    MLPSources,
    all_sources,
    decoder_sources,
)
from penstock.models.weights.sources import Source
from tests.gpu_worker.families.checkpoints import config_of
from tests.gpu_worker.families.table import CASES

Ids = NDArray[np.int64]


class Stored:
    """Tensors whose every number is another one; what is read of them is marked."""

    def __init__(self) -> None:
        self.tensors: dict[str, Ids] = {}
        self.num_read: dict[str, Ids] = {}
        self._next = 0

    def weight(self, source: Source, *, is_counted: bool = True) -> Ids:
        """The weight that a source describes, [..., out, in], by the words of `Source`."""
        parts = []
        for i, (name, shape) in enumerate(zip(source.names, source.shapes, strict=True)):
            if name not in self.tensors:
                size = math.prod(shape)
                self.tensors[name] = np.arange(self._next, self._next + size).reshape(shape)
                self.num_read[name] = np.zeros(shape, np.int64)
                self._next += size
            index = [
                np.arange(size) if ranges is None else np.concatenate([np.arange(*its) for its in ranges])
                for size, ranges in zip(shape, source.stored_ranges(i), strict=True)
            ]
            if is_counted:
                self.num_read[name][np.ix_(*index)] += 1
            part = self.tensors[name][np.ix_(*index)]
            assert part.shape == source.part_shape(i)
            parts.append(part.swapaxes(-1, -2) if source.is_transposed else part)
        stack = np.concatenate(parts)
        if source.num_stacked:
            stack = stack.reshape(source.num_stacked, -1, *stack.shape[1:])
        return stack if source.order is None else stack.take(source.order, axis=source.axis)


def decoder_of(name: str) -> Decoder:
    config = config_of(CASES[name])
    model: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    decoder = parse_model_config(config.to_dict() | {"architectures": [model.__name__]})
    assert isinstance(decoder, Decoder)
    return decoder


def inner(whole: Ids, part: Ids, axis: int) -> list[int]:
    """Where a part is along an axis of the whole; it must be all of the others."""
    place = {
        int(number): i for i, number in enumerate(np.moveaxis(whole, axis, 0).reshape(whole.shape[axis], -1)[:, 0])
    }
    of_part = np.moveaxis(part, axis, 0).reshape(part.shape[axis], -1)
    chosen = [place[int(number)] for number in of_part[:, 0]]
    assert (whole.take(chosen, axis=axis) == part).all()
    return chosen


@pytest.mark.parametrize("name", CASES)
def test_shards_of_a_family_are_the_whole(name: str) -> None:
    whole = decoder_of(name)
    for size in (2, 4):
        places = [Place(number, size) for number in range(size)]
        if whole.state_layers:
            with pytest.raises(ConfigError, match="keep a state, which cannot be split"):
                shard_of(whole, places[0])
            continue
        if any(its.num_heads % size for _, its in whole.attentions):
            with pytest.raises(ConfigError, match="attention heads"):
                shard_of(whole, places[0])
            continue
        ranks = [shard_of(whole, place) for place in places]
        stored = Stored()
        for rank in ranks:
            assert isinstance(rank, Decoder)
            for source in all_sources(sources_of(rank)):
                stored.weight(source)
            check_sizes(rank, stored)
            for number in range(len(whole.layers)):
                check_layer(whole, rank, number, stored)
        least = min(int(times.min()) for times in stored.num_read.values())
        assert least == 1, [key for key, times in stored.num_read.items() if times.min() == 0]
        assert set(stored.tensors) == {key for its in all_sources(decoder_sources(whole)) for key in its.names}
        check_what_is_read_twice(whole, stored, size)


def check_sizes(rank: Decoder, stored: Stored) -> None:
    """Weights have the shapes that the rank's description has, as if it were that of a whole model."""
    alone = decoder_sources(replace(rank, shard=None))
    for its, expected in zip(sources_of(rank).layers, alone.layers, strict=True):
        for ours, theirs in zip(all_sources(its), all_sources(_without_biases(expected, its)), strict=True):
            shape = stored.weight(ours, is_counted=False).shape
            described = Stored().weight(theirs).shape
            assert shape == described, ours.names


def _without_biases(expected: Any, its: Any) -> Any:
    """What is described, without the biases that another rank adds."""
    if isinstance(expected, tuple) and type(expected) is type(its) and not isinstance(expected, str | Source):
        parts = [_without_biases(*pair) for pair in zip(expected, its, strict=True)]
        return type(expected)(*parts) if hasattr(expected, "_fields") else tuple(parts)
    return None if its is None else expected


def check_layer(whole: Decoder, rank: Decoder, number: int, stored: Stored) -> None:
    """Each rank's heads and inner numbers are the same ones in what comes before and what comes after them."""
    of_whole, of_rank = decoder_sources(whole).layers[number], sources_of(rank).layers[number]
    layer = whole.layers[number]

    def places(one: Source, other: Source, axis: int) -> list[int]:
        return inner(stored.weight(one, is_counted=False), stored.weight(other, is_counted=False), axis)

    mixer, theirs, ours = layer.mixer, of_whole.mixer, of_rank.mixer
    assert theirs is not None
    assert ours is not None
    assert layer.mlp is not None
    into_o = places(theirs.o.weight, ours.o.weight, -1)
    if isinstance(mixer, LatentAttention):
        assert isinstance(theirs, LatentSources)
        assert isinstance(ours, LatentSources)
        heads = sorted({place // mixer.v_dim for place in into_o})
        assert into_o == [head * mixer.v_dim + i for head in heads for i in range(mixer.v_dim)]
        q_dim = mixer.nope_dim + mixer.rope_dim
        of_q = places(theirs.q.weight, ours.q.weight, 0)
        assert of_q == [head * q_dim + i for head in heads for i in range(q_dim)]
        for one, other in zip(theirs.kv_b, ours.kv_b, strict=True):
            each = 1 if len(ours.kv_b) > 1 else mixer.nope_dim + mixer.v_dim
            assert places(one, other, 0) == [head * each + i for head in heads for i in range(each)]
    else:
        assert isinstance(mixer, Attention)
        assert isinstance(theirs, AttentionSources)
        assert isinstance(ours, AttentionSources)
        dim = mixer.head_dim
        heads = sorted({place // dim for place in into_o})
        assert into_o == [head * dim + i for head in heads for i in range(dim)]
        of_group = mixer.num_heads // mixer.num_kv_heads
        kv_heads = sorted({head // of_group for head in heads})
        all_heads = list(heads)
        if mixer.shares_kv_of is None:
            all_heads += [mixer.num_heads + head for head in kv_heads]
            all_heads += [mixer.num_heads + mixer.num_kv_heads + head for head in kv_heads]
        of_qkv = [head * dim + i for head in all_heads for i in range(dim)]
        found = stored.weight(ours.qkv.weight, is_counted=False)
        expected = stored.weight(theirs.qkv.weight, is_counted=False)
        assert (found == expected[of_qkv]).all()
        if theirs.qkv.bias is not None and ours.qkv.bias is not None:
            assert places(theirs.qkv.bias, ours.qkv.bias, 0)[: len(heads) * dim] == of_qkv[: len(heads) * dim]
        if theirs.sinks is not None and ours.sinks is not None:
            assert places(theirs.sinks, ours.sinks, 0) == heads
    pairs: list[tuple[Any, Any, DenseMLP | Experts]] = [(of_whole.mlp, of_rank.mlp, layer.mlp)]
    if of_whole.beside_mlp is not None and of_rank.beside_mlp is not None and layer.beside_mlp is not None:
        pairs.append((of_whole.beside_mlp.experts, of_rank.beside_mlp.experts, layer.beside_mlp.experts))
    for all_of, part, mlp in pairs:
        _check_mlp(all_of, part, mlp, places)
        if isinstance(all_of, ExpertsSources) and all_of.shared is not None and isinstance(mlp, Experts):
            assert mlp.shared is not None
            _check_mlp(all_of.shared, part.shared, mlp.shared, places)


def _check_mlp(whole: Any, part: Any, mlp: DenseMLP | Experts, places: Any) -> None:
    assert isinstance(whole, MLPSources | ExpertsSources)
    into_down = places(whole.down.weight, part.down.weight, -1)
    num_halves = 2 if isinstance(mlp, Experts) or mlp.is_gated else 1
    chosen = [half * mlp.size + place for half in range(num_halves) for place in into_down]
    assert places(whole.gate_up.weight, part.gate_up.weight, -2) == chosen
    if whole.gate_up.bias is not None:
        assert places(whole.gate_up.bias, part.gate_up.bias, -1) == chosen


def check_what_is_read_twice(whole: Decoder, stored: Stored, size: int) -> None:
    """Matrices are read once, apart from those that every rank has, and KV heads that are fewer than ranks."""
    names = whole.names
    every = {names.router, names.q_a, names.kv_a, names.layer_input_down, names.layer_input_up, names.shared_gate}
    every |= {names.index_q, names.index_k, names.index_weights}
    for name, times in stored.num_read.items():
        if times.ndim < 2 or any(f".{each}." in name for each in every if each):
            continue
        if name.startswith((names.layer_projection, names.positions or "-", names.correction)):
            continue
        num_kv_heads = min((its.num_heads for its in whole.kv), default=1)
        is_kv = any(f"{each}." in name for each in (*names.qkv, names.k_norm) if each) and num_kv_heads < size
        ties = 2 if name.startswith(names.embedding) and whole.head_bias and whole.tied_embeddings else 1
        most = size // num_kv_heads if is_kv else ties
        if whole.names.qkv and any(mixer.values_are_keys for mixer in _attentions(whole)) and names.qkv[1] in name:
            most *= 2
        if "norm" in name or name.endswith("e_score_correction_bias"):
            continue
        assert times.max() <= most, name


def _attentions(whole: Decoder) -> list[Attention]:
    return [layer.mixer for layer in whole.layers if isinstance(layer.mixer, Attention)]
