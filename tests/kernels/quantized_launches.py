"""Products with quantized matrices of real shapes, on tensors without storage."""

import torch
from torch import Tensor

from penstock.kernels.activation import Activation
from penstock.kernels.quantized.device_weight import BLOCK, DeviceWeight, pack_for_device
from penstock.kernels.quantized.inputs import RoundedInputs
from penstock.kernels.quantized.weight import InputRounding
from penstock.kernels.triton.experts.experts import group_rows_triton
from penstock.kernels.triton.quantized.inputs import round_inputs_triton
from penstock.kernels.triton.quantized.linear import grouped_quantized_linear_triton, quantized_linear_triton
from penstock.kernels.triton.quantized.rows import quantized_rows_triton
from tests.faults.soak import IS_SOAK
from tests.kernels.quantized_cases import FORMATS

CHOSEN = {
    "GPTQ": (1, 16, 256, 4096),
    "Q4_K": (16, 256),
    "Q5_K": (1, 256),
    "Q6_K": (4096,),
    "NF4": (1, 256),
    "INT8 W8A8": (16, 4096),
    "FP8 W8A8": (64, 4096),
    "FP8 blocks": (16, 4096),
}
"""Rows that are compiled by default, by format: the largest tiles, and those of decode; in soak all."""
HIDDEN = 4096
EXPERTS, HIDDEN_OF_EXPERTS = 32, 2880  # gpt-oss-20b


def launch_quantized() -> None:
    for name, numbers in dict.fromkeys(FORMATS, (1, 16, 64, 256, 4096)).items() if IS_SOAK else CHOSEN.items():
        weight = _matrix(name, HIDDEN)
        for num_rows in numbers:
            quantized_linear_triton(_inputs(num_rows, weight), weight, None, torch.bfloat16)
    # As many blocks as rows, a few of each expert's rows, and many.
    for name in ("GPTQ", "MXFP4", "Q5_K", "INT8 W8A8", "FP8 blocks") if IS_SOAK else ("MXFP4",):
        weight = _matrix(name, HIDDEN_OF_EXPERTS, EXPERTS)
        for num_tokens in (1, 256, 8192) if IS_SOAK else (1, 8192):
            grouped = group_rows_triton(_meta(num_tokens, 4, dtype=torch.int32), EXPERTS)
            bias = _meta(EXPERTS, HIDDEN_OF_EXPERTS)
            x = _inputs(num_tokens, weight)
            grouped_quantized_linear_triton(x, grouped, weight, bias, torch.bfloat16, of_tokens=True)
    for name in FORMATS if IS_SOAK else ("Q6_K",):
        quantized_rows_triton(_matrix(name, HIDDEN), _meta(16, dtype=torch.int64), torch.bfloat16)
    round_inputs_triton(_meta(16, 14336), InputRounding("int8"))
    round_inputs_triton(_meta(16, 2 * 14336), InputRounding("int8"), Activation("silu"))
    round_inputs_triton(_meta(16, HIDDEN), InputRounding("fp8_e4m3", group=128))


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _matrix(name: str, size: int, num_experts: int | None = None) -> DeviceWeight:
    """[size, size], of one output in truth."""
    packed = pack_for_device(FORMATS[name](1, size), "cpu")
    shape = (size,) if num_experts is None else (num_experts, size)

    def grown(its: object) -> object:
        return _meta(*shape, its.shape[-1], dtype=its.dtype) if isinstance(its, Tensor) and its.ndim == 2 else its

    changed = {name: grown(its) for name, its in packed._asdict().items() if name != "planes"}
    if packed.block_scales is not None:
        changed["block_scales"] = _meta(-(-size // BLOCK), size // BLOCK, dtype=torch.float32)
    planes = tuple(_meta(*shape, plane.shape[-1], dtype=plane.dtype) for plane in packed.planes)
    return DeviceWeight(**{**changed, "planes": planes})  # type: ignore[arg-type]


def _inputs(num_rows: int, weight: DeviceWeight) -> Tensor | RoundedInputs:
    x = _meta(num_rows, weight.num_inputs)
    return x if weight.inputs is None else round_inputs_triton(x, weight.inputs)
