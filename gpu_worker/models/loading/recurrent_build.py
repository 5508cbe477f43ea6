"""From a checkpoint to mixers that keep a state for each row."""

import torch
from torch import Tensor

from penstock.gpu_worker.models.blocks.recurrent import (
    GatedDeltaBlock,
    KimiDeltaBlock,
    Mamba1Block,
    Mamba2Block,
    RecurrentBlock,
    ShortConvBlock,
)
from penstock.gpu_worker.models.loading.norms import read_norm
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.kernels.scan.causal_conv1d import ConvWeights
from penstock.kernels.scan.gated_norm import GatedNorm
from penstock.models.description.recurrent import KimiDelta, Mamba1, Mamba2, Recurrent, ShortConv
from penstock.models.weights.recurrent import RecurrentSources
from penstock.models.weights.sources import Source


def recurrent(mixer: Recurrent, sources: RecurrentSources, reader: WeightReader) -> RecurrentBlock:
    """The block, with its weights."""
    projection, out = reader.linear(sources.projection), reader.linear(sources.out)
    bias = None if sources.conv_bias is None else reader.tensor(sources.conv_bias)
    conv = ConvWeights(reader.tensor(sources.conv).squeeze(1), bias, has_silu=not isinstance(mixer, ShortConv))
    if isinstance(mixer, ShortConv):
        return ShortConvBlock(mixer, projection, conv, out)
    a, dt_bias = -_floats(sources.a_log, reader).exp(), _floats(sources.dt_bias, reader)
    weight = None if sources.norm is None or sources.norm.weight is None else reader.tensor(sources.norm.weight)
    if isinstance(mixer, Mamba1):
        assert sources.gates is not None
        assert sources.steps is not None
        norms = tuple(each for source in sources.gate_norms if (each := read_norm(source, reader)) is not None)
        gates, steps, skip = reader.linear(sources.gates), reader.linear(sources.steps), _floats(sources.skip, reader)
        return Mamba1Block(mixer, projection, conv, gates, norms, steps, a.T.contiguous(), dt_bias, skip, out)
    if isinstance(mixer, Mamba2):
        norm = GatedNorm(
            weight, mixer.norm_eps or 0.0, mixer.inner // mixer.norm_groups, norms_first=mixer.norm_precedes_gate
        )
        skip = _floats(sources.skip, reader)
        return Mamba2Block(mixer, projection, conv, a, dt_bias, skip, norm, out, _in_scales(mixer, reader))
    assert sources.gates is not None
    if isinstance(mixer, KimiDelta):
        assert sources.steps is not None
        assert sources.opening is not None
        gates, steps, opening = map(reader.linear, (sources.gates, sources.steps, sources.opening))
        norm = GatedNorm(weight, mixer.norm_eps, mixer.head_dim, norms_first=True, is_sigmoid=True)
        dt_bias = dt_bias.view(mixer.num_heads, mixer.head_dim)
        return KimiDeltaBlock(mixer, projection, gates, conv, steps, opening, a.flatten(), dt_bias, norm, out)
    norm = GatedNorm(weight, mixer.norm_eps, mixer.value_dim, norms_first=True)
    return GatedDeltaBlock(mixer, projection, reader.linear(sources.gates), conv, a, dt_bias, norm, out)


def _in_scales(mixer: Mamba2, reader: WeightReader) -> Tensor | None:
    if mixer.in_scales is None:
        return None
    of_groups = mixer.num_groups * mixer.state_size
    sizes = torch.tensor((mixer.inner, mixer.inner, of_groups, of_groups, mixer.num_heads))
    scales = torch.tensor(mixer.in_scales).repeat_interleave(sizes)
    return scales.to(device=reader.device, dtype=reader.dtype)


def _floats(source: Source | None, reader: WeightReader) -> Tensor:
    assert source is not None
    return reader.tensor(source, torch.float32)
