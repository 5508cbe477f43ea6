"""The operations of a program as C structs, with the fields of the headers beside this file."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

from penstock.kernels.native.attention.latents import IndexerStruct, LatentStruct
from penstock.kernels.native.experts.packed import ExpertsStruct
from penstock.kernels.native.library import LinearStruct

Fields = Sequence[tuple[str, type]]


def numbers(*names: str) -> Fields:
    return [(name, c_int32) for name in names]


def pointers(*names: str) -> Fields:
    return [(name, c_void_p) for name in names]


class NormWeightsStruct(ctypes.Structure):
    _fields_ = (*pointers("weight", "bias"), ("eps", c_float), ("kind", c_int32))


class Embedding(ctypes.Structure):
    _fields_ = (
        ("table", c_void_p),
        ("packed", LinearStruct),
        *numbers("kind", "size", "to", "first", "num_rows"),
        ("scale", c_float),
        ("without_id", c_int32),
    )


class Positions(ctypes.Structure):
    _fields_ = (*pointers("table"), *numbers("kind", "size", "to", "offset"))


class Norm(ctypes.Structure):
    _fields_ = (
        ("norm", NormWeightsStruct),
        *numbers("size", "count", "from_", "begin", "to", "first", "is_added"),
        ("scale", c_float),
    )


class Scaling(ctypes.Structure):
    _fields_ = (*numbers("size", "from_", "first", "to", "begin"), ("scale", c_float))


class Heads(ctypes.Structure):
    _fields_ = (
        *((name, NormWeightsStruct) for name in ("q_norm", "k_norm", "v_norm")),
        *numbers("qkv", "num_q_heads", "num_kv_heads", "head_dim", "layer"),
        *numbers("rotary", "norm_size", "norm_step", "norms_follow_rotation"),
        *(("growth_beta", c_float), ("growth_length", c_float), ("growth_shift", c_int32)),
        *(("k_scale", c_float), ("v_scale", c_float), ("gap", c_int32)),
    )


class Product(ctypes.Structure):
    _fields_ = (
        ("linear", LinearStruct),
        *numbers("from_", "to", "first", "finish", "activation", "site"),
        ("scale", c_float),
    )


class Attending(ctypes.Structure):
    _fields_ = (
        *numbers("qkv", "to", "num_q_heads", "num_kv_heads", "head_dim", "layer", "window"),
        *(("scale", c_float), ("softcap", c_float), ("sinks", c_void_p)),
    )


class Gating(ctypes.Structure):
    _fields_ = (*pointers("weights"), *numbers("num_inputs", "size", "from_", "to"))


class Tapping(ctypes.Structure):
    _fields_ = numbers("from_", "size", "first", "stride")


class Adding(ctypes.Structure):
    _fields_ = numbers("to", "size", "first", "stride")


class Reducing(ctypes.Structure):
    _fields_ = (
        ("group", c_void_p),
        *(("ahead", c_void_p), ("ahead_bytes", c_int64)),
        *numbers("size", "from_", "to", "is_added"),
        ("scale", c_float),
    )


class Mixing(ctypes.Structure):
    _fields_ = (("experts", ExpertsStruct), *numbers("from_", "judged", "to", "is_added"), ("scale", c_float))


class Latents(ctypes.Structure):
    _fields_ = (("attention", LatentStruct), *numbers("latents", "q", "to", "layer", "rotary"))


class KeepingLatents(Latents):
    pass


class AttendingLatents(Latents):
    pass


class Choosing(ctypes.Structure):
    _fields_ = (("indexer", IndexerStruct), *numbers("k", "q", "weights", "layer", "rotary"))


class KeepingIndexKeys(Choosing):
    pass


class ConvolutionStruct(ctypes.Structure):
    _fields_ = (*pointers("weight", "bias"), *numbers("channels", "width", "has_silu"))


class Convolving(ctypes.Structure):
    _fields_ = (
        ("convolution", ConvolutionStruct),
        *numbers("from_", "first", "input_gate", "output_gate", "to", "to_first", "state"),
    )


class Mamba1Struct(ctypes.Structure):
    _fields_ = (*pointers("a", "dt_bias", "skip"), *numbers("channels", "state_size"))


class Mamba1Scanning(ctypes.Structure):
    _fields_ = (("scan", Mamba1Struct), *numbers("from_", "x", "dts", "gates", "b", "c", "to", "state"))


class Mamba2Struct(ctypes.Structure):
    _fields_ = (
        *pointers("a", "dt_bias", "skip"),
        *(("min_dt", c_float), ("max_dt", c_float)),
        *numbers("num_heads", "num_groups", "head_dim", "state_size"),
    )


class Mamba2Scanning(ctypes.Structure):
    _fields_ = (("scan", Mamba2Struct), *numbers("from_", "x", "b", "c", "dt", "to", "state"))


class GatedDeltaStruct(ctypes.Structure):
    _fields_ = (
        *pointers("a", "dt_bias"),
        *numbers("num_heads", "num_key_heads", "key_dim", "value_dim"),
        *(("max_beta", c_float), ("decays_by_key", c_int32)),
    )


class DeltaScanning(ctypes.Structure):
    _fields_ = (
        ("scan", GatedDeltaStruct),
        *numbers("from_", "q", "k", "v", "steps", "dt", "gates", "b", "to", "state"),
    )


class GatedNorm(ctypes.Structure):
    _fields_ = (
        ("norm", NormWeightsStruct),
        *numbers("x", "gate", "gate_first", "size", "group_size", "weight_step", "norms_first", "is_sigmoid"),
    )


# As enum OperationKind in program.h.
OPERATIONS = (
    *(Embedding, Positions, Norm, Scaling, Heads, Gating, Tapping, Adding, KeepingLatents, GatedNorm),
    KeepingIndexKeys,
    *(Product, Attending, Mixing, AttendingLatents, Reducing),
    *(Convolving, Mamba1Scanning, Mamba2Scanning, DeltaScanning, Choosing),
)
