"""Products of many rows, by cuBLAS: with a part of the matrix in floats, or with codes of FP8 as they are."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from penstock.kernels.quantized.device_weight import BLOCK, DeviceWeight
from penstock.kernels.quantized.inputs import RoundedInputs
from penstock.kernels.triton.device import ceil_div, device_facts
from penstock.kernels.triton.quantized.tiles import weight_arguments, weight_tile

MOST_ROWS_OF_PACKED = 256
"""The most rows that are multiplied with packed numbers: each 128 rows unpack the whole matrix again.

For more, the matrix is written as floats once. Of 2**27 weights of 4 bits on an H100, that takes 64 MiB of reading and
256 MiB of writing, at 3 TB/s 0.11 ms. cuBLAS multiplies them with 512 rows in 0.16 ms, where packed numbers take
0.37 ms (4 bits) to 0.93 ms (Q6_K); with 256 rows, both ways take the same time for 4 bits.
"""
MOST_ROWS_OF_CODES = 64
"""The most rows of FP8 that our tiles multiply. So many rows take no longer than reading the matrix does."""
_FLOATS_AT_A_TIME = 1 << 25
"""How many weights become floats together: 64 MiB in half precision, most of which an H100's cache still holds when
they are multiplied. With 4,096 inputs they are 8,192 outputs, which are enough tiles for all multiprocessors."""
_ALIGNED_OUTPUTS = 256
"""Parts are multiples of so many outputs, the largest tiles of cuBLAS."""


@triton.jit
def weight_as_floats_kernel(
    out_ptr, first_output, num_outputs, num_inputs,
    low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr, values_ptr,
    low_bytes, high_bytes, num_groups, num_supers,
    LOW: tl.constexpr, HIGH: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_SUPERS: tl.constexpr, ARE_EXPONENTS: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(K / BLOCK_K), ceil(N / BLOCK_N)): `num_outputs` of the matrix from `first_output` on."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < num_outputs
    outputs = first_output + tl.where(is_output, n, 0).to(tl.int64)
    first = tl.program_id(0) * BLOCK_K
    numbers = weight_tile(
        outputs, first, low_ptr, high_ptr, scales_ptr, zeros_ptr, minimums_ptr, super_scales_ptr, super_minimums_ptr,
        values_ptr, low_bytes, high_bytes, num_groups, num_supers, LOW, HIGH, NUMBERS, ZERO, GROUP, HAS_ZEROS,
        HAS_MINIMUMS, HAS_SUPERS, ARE_EXPONENTS, OUTPUT_SCALES, BLOCK_K, EVEN_K,
    )  # fmt: skip
    if OUTPUT_SCALES:
        numbers *= tl.load(scales_ptr + outputs)[:, None]
    k = first + tl.arange(0, BLOCK_K)
    out_ptrs = out_ptr + n.to(tl.int64)[:, None] * num_inputs + k[None, :]
    tl.store(out_ptrs, numbers.to(out_ptr.dtype.element_ty), mask=is_output[:, None] & (k < num_inputs)[None, :])


def product_of_floats(x: Tensor, weight: DeviceWeight, bias: Tensor | None, out: Tensor) -> None:
    """x @ weight^T + bias into `out`; arguments as those of `quantized_linear_triton`."""
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    num_parts = ceil_div(num_outputs * num_inputs, _FLOATS_AT_A_TIME)
    size = ceil_div(ceil_div(num_outputs, num_parts), _ALIGNED_OUTPUTS) * _ALIGNED_OUTPUTS
    room = torch.empty((min(size, num_outputs), num_inputs), dtype=out.dtype, device=out.device)
    for begin in range(0, num_outputs, size):
        end = min(begin + size, num_outputs)
        matrix, its_out = room[: end - begin], out[:, begin:end]
        _write_floats(weight, begin, matrix)
        if bias is None:
            torch.mm(x, matrix.t(), out=its_out)
        else:
            torch.addmm(bias[begin:end], x, matrix.t(), out=its_out)


def _write_floats(weight: DeviceWeight, begin: int, out: Tensor) -> None:
    """The outputs from `begin` on as floats, as many as `out` has rows."""
    num_outputs, num_inputs = out.shape
    block_n, block_k = 8, 512
    weight_as_floats_kernel[(ceil_div(num_inputs, block_k), ceil_div(num_outputs, block_n))](
        out, begin, num_outputs, num_inputs, **weight_arguments(weight), BLOCK_N=block_n, BLOCK_K=block_k,
        EVEN_K=num_inputs % block_k == 0, num_warps=4,
    )  # fmt: skip


def has_product_of_codes(x: Tensor | RoundedInputs, weight: DeviceWeight, dtype: torch.dtype) -> bool:
    """Whether cuBLAS multiplies both sides as they are stored, with `product_of_codes`.

    It needs multiples of 16 and a result in bf16, and GPUs with FP8. Scales of blocks need Hopper and CUDA 12.9; scales
    of rows are refused by cuBLAS on GPUs of capability 12.
    """
    if isinstance(x, Tensor) or x.codes.dtype != torch.float8_e4m3fn or weight.numbers != "e4m3":
        return False
    if dtype != torch.bfloat16 or weight.num_outputs % 16 or weight.num_inputs % 16:
        return False
    capability = device_facts(weight.device).capability
    if x.scales.shape[1] == 1 and weight.has_output_scales:
        return (8, 9) <= capability < (12, 0)
    has_blocks = weight.block_scales is not None and x.group == BLOCK
    return has_blocks and capability[0] == 9 and _cuda_version() >= (12, 9)


def _cuda_version() -> tuple[int, ...]:
    """Of torch's libraries; a torch without CUDA counts as new, as Triton's interpreter has no GPU either."""
    return tuple(map(int, (torch.version.cuda or "99.0").split(".")[:2]))


def product_of_codes(x: RoundedInputs, weight: DeviceWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """codes @ codes^T, scaled, + bias -> [T, N] of `dtype`; see `has_product_of_codes`."""
    matrix = weight.planes[0].view(torch.float8_e4m3fn)[:, : weight.num_inputs].t()
    num_rows = x.codes.shape[0]
    if weight.block_scales is None:
        scales = x.scales.expand(num_rows, 1).contiguous()
        return torch._scaled_mm(x.codes, matrix, scales, weight.scales.t(), bias, out_dtype=dtype)
    # Scales of rows come first in memory, and columns of them are aligned to 16 bytes.
    padding = -num_rows % 4
    codes = functional.pad(x.codes.view(torch.uint8), (0, 0, 0, padding)).view(torch.float8_e4m3fn)
    scales = functional.pad(x.scales.t(), (0, padding)).contiguous().t()
    return torch._scaled_mm(codes, matrix, scales, weight.block_scales.t(), bias, out_dtype=dtype)[:num_rows]
