"""Quantized matrices of every kind that checkpoints have."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.quantized.device_weight import E2M1, E4M3
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight, dequantized, stacked

NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
IQ4_NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).float()


def _codes(bits: int, num_outputs: int, num_inputs: int) -> Tensor:
    return torch.randint(2**bits, (num_outputs, num_inputs), dtype=torch.uint8)


def _plain(
    num_outputs: int, num_inputs: int, *, bits: int, group: int, zeros: bool | int = 0, minimums: bool = False,
    dtype: torch.dtype = torch.float16, values: Tensor | None = None, order: bool = False,
    inputs: InputRounding | None = None,
) -> QuantizedWeight:  # fmt: skip
    group = group or num_inputs
    shape = (num_outputs, -(-num_inputs // group))
    largest = 2**bits if values is None else float(values.nan_to_num().abs().max())
    scales = (0.5 + torch.rand(shape)) / (largest * num_inputs**0.5)
    codes = _codes(bits, num_outputs, num_inputs)
    if values is not None and bool(values.isnan().any()):
        codes[(codes & 127) == 127] = 3
    return QuantizedWeight(
        codes,
        bits,
        group,
        scales.to(dtype),
        zeros=zeros if zeros is not True else _codes(bits, *shape),
        minimums=torch.rand(shape).to(dtype) / num_inputs**0.5 if minimums else None,
        values=values,
        order=torch.randperm(num_inputs) if order else None,
        inputs=inputs,
    )


def _k_quant(num_outputs: int, num_inputs: int, *, bits: int, group: int, minimums: bool) -> QuantizedWeight:
    groups, supers = -(-num_inputs // group), -(-num_inputs // 256)
    zero = 0 if minimums else 1 << (bits - 1)
    of_groups = torch.randint(64, (num_outputs, groups))
    shape = (num_outputs, supers)
    largest = 64 * 2**bits * num_inputs**0.5
    return QuantizedWeight(
        _codes(bits, num_outputs, num_inputs),
        bits,
        group,
        scales=of_groups.to(torch.uint8) if minimums else (of_groups - 32).to(torch.int8),
        zeros=zero,
        minimums=torch.randint(64, (num_outputs, groups), dtype=torch.uint8) if minimums else None,
        super_scales=((0.5 + torch.rand(shape)) / largest).half(),
        super_minimums=(torch.rand(shape) / (64 * num_inputs**0.5)).half() if minimums else None,
    )


def _mxfp4(num_outputs: int, num_inputs: int, *, factor: float = 1.0) -> QuantizedWeight:
    weight = _plain(num_outputs, num_inputs, bits=4, group=32, values=E2M1 * factor, dtype=torch.float32)
    return weight._replace(scales=torch.exp2(torch.randint(-9, -4, weight.scales.shape).float()))


Make = Callable[[int, int], QuantizedWeight]
"""Of the numbers of outputs and inputs."""

FORMATS: dict[str, Make] = {
    "GPTQ": partial(_plain, bits=4, group=128, zeros=True),
    "GPTQ, desc_act": partial(_plain, bits=4, group=64, zeros=True, order=True),
    "GPTQ 8 bit": partial(_plain, bits=8, group=32, zeros=True),
    "W4A16": partial(_plain, bits=4, group=128, zeros=8, dtype=torch.bfloat16),
    "W4A16, whole": partial(_plain, bits=4, group=0, zeros=8, dtype=torch.bfloat16),
    "W8A16": partial(_plain, bits=8, group=0, zeros=128),
    "groups of 48": partial(_plain, bits=4, group=48, zeros=8),
    "Q8_0": partial(_plain, bits=8, group=32, zeros=128),
    "Q4_0": partial(_plain, bits=4, group=32, zeros=8),
    "Q4_1": partial(_plain, bits=4, group=32, minimums=True),
    "Q5_0": partial(_plain, bits=5, group=32, zeros=16),
    "Q5_1": partial(_plain, bits=5, group=32, minimums=True),
    "Q2_K": partial(_k_quant, bits=2, group=16, minimums=True),
    "Q3_K": partial(_k_quant, bits=3, group=16, minimums=False),
    "Q4_K": partial(_k_quant, bits=4, group=32, minimums=True),
    "Q5_K": partial(_k_quant, bits=5, group=32, minimums=True),
    "Q6_K": partial(_k_quant, bits=6, group=16, minimums=False),
    "IQ4_NL": partial(_plain, bits=4, group=32, values=IQ4_NL),
    "NF4": partial(_plain, bits=4, group=64, values=NF4, dtype=torch.float32),
    "MXFP4": _mxfp4,
    "MXFP4 of GGUF": partial(_mxfp4, factor=2.0),
    "FP8 weights": partial(_plain, bits=8, group=0, values=E4M3, dtype=torch.float32),
    "INT8 W8A8": partial(
        _plain, bits=8, group=0, zeros=128, dtype=torch.float32, inputs=InputRounding("int8")
    ),
    "INT8 W8A8, static": partial(
        _plain, bits=8, group=0, zeros=128, dtype=torch.float32, inputs=InputRounding("int8", torch.tensor(0.03))
    ),
    "W4A8": partial(_plain, bits=4, group=64, zeros=8, inputs=InputRounding("int8")),
    "FP8 W8A8": partial(
        _plain, bits=8, group=0, values=E4M3, dtype=torch.float32, inputs=InputRounding("fp8_e4m3")
    ),
    "FP8 W8A8, static": partial(
        _plain, bits=8, group=0, values=E4M3, dtype=torch.float32,
        inputs=InputRounding("fp8_e4m3", torch.tensor(0.01)),
    ),
    "FP8 blocks": partial(
        _plain, bits=8, group=128, values=E4M3, dtype=torch.float32, inputs=InputRounding("fp8_e4m3", group=128)
    ),
}  # fmt: skip

LAYOUTS: dict[str, Make] = {
    **{name: make for name, make in FORMATS.items() if "FP8" not in name and name != "NF4"},
    **{f"{bits} bits of 128": partial(_plain, bits=bits, group=128, zeros=1 << (bits - 1)) for bits in (2, 3, 5, 6, 8)},
    **{f"4 bits of {group}": partial(_plain, bits=4, group=group, zeros=8) for group in (16, 96, 256, 384, 512)},
    "8 bits, zeros": partial(_plain, bits=8, group=0, zeros=True),
    "fp32 scales": partial(_plain, bits=4, group=64, zeros=8, dtype=torch.float32),
    "zeros and minimums": partial(_plain, bits=4, group=64, zeros=True, minimums=True),
    "W8A8, zeros": partial(_plain, bits=8, group=0, zeros=True, inputs=InputRounding("int8")),
    "W8A8, groups of inputs": partial(_plain, bits=8, group=128, zeros=128, inputs=InputRounding("int8", group=128)),
    "W8A8, large groups of inputs": partial(
        _plain, bits=8, group=0, zeros=128, inputs=InputRounding("int8", group=512)
    ),
}
"""What the CPU's own kernels multiply as integers, in all the ways that they keep it."""


def experts_of(name: str, num_experts: int, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """Matrices of as many experts."""
    made = [FORMATS[name](num_outputs, num_inputs)._replace(order=None) for _ in range(num_experts)]
    together = stacked(made)
    assert together is not None
    return together


def exact_product(x: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """fp64 (x @ weight^T, |x| @ |weight|^T): the product, and what its rounding errors are relative to."""
    matrix = dequantized(weight).double()
    return x.double() @ matrix.T, x.double().abs() @ matrix.abs().T
