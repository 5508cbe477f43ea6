"""Cases of products with quantized weights, beside torch's product with the same weights in bf16."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bench.kernels.small import Calls, Case
from bench.kernels.timing import num_rotations
from penstock.kernels.experts.experts import group_rows
from penstock.kernels.quantized.device_weight import E2M1, E4M3, DeviceWeight, pack_for_device
from penstock.kernels.quantized.inputs import round_inputs
from penstock.kernels.quantized.linear import grouped_quantized_linear, quantized_linear
from penstock.kernels.quantized.weight import InputRounding, QuantizedWeight

FORMATS = ("GPTQ g128", "Q4_K", "Q6_K", "NF4", "MXFP4", "INT8", "INT8 W8A8", "FP8 W8A8", "FP8 blocks")
ROWS = (1, 16, 64, 512, 4096)


def quantized_cases(dry: bool) -> Iterator[Case]:
    """Llama-3.1-8B's gate and up matrix, 28,672 outputs of 4,096 inputs; gpt-oss-20b's in MXFP4; rounding of inputs.

    One after the other: they would not fit in memory together.
    """
    device, dtype = ("cpu", torch.float32) if dry else ("cuda", torch.bfloat16)
    num_outputs, num_inputs = (24, 256) if dry else (28672, 4096)
    for name in FORMATS:
        weight = random_weight(name, (num_outputs, num_inputs), device)
        for rows in (3,) if dry else ROWS:
            yield _case(name, rows, weight, dtype, dry)
    num_experts, top_k, shape = (4, 2, (48, 64)) if dry else (32, 4, (5760, 2880))
    experts = random_weight("MXFP4", (num_experts, *shape), device)
    for tokens in (3,) if dry else (1, 64, 4096):
        yield _mixture_case(experts, top_k, tokens, dtype, dry)
    rounding = InputRounding("int8")
    for tokens in (3,) if dry else (16, 4096):
        x = torch.randn(_rotations(dry, tokens * num_inputs * 3), tokens, num_inputs, device=device, dtype=dtype)
        calls: Calls = [functools.partial(round_inputs, its, rounding) for its in x]
        yield Case(f"rounding to int8, T={tokens}", tokens * num_inputs * (dtype.itemsize + 1), calls)


def _rotations(dry: bool, num_bytes: int) -> int:
    return 1 if dry else num_rotations(num_bytes)


def random_weight(name: str, shape: tuple[int, ...], device: str) -> DeviceWeight:
    """[N, K] or [E, N, K] of random codes: no time depends on what they are."""
    bits = {"Q6_K": 6, "INT8": 8, "INT8 W8A8": 8, "FP8 W8A8": 8, "FP8 blocks": 8}.get(name, 4)
    whole = shape[-1]
    group = {"GPTQ g128": 128, "Q4_K": 32, "Q6_K": 16, "NF4": 64, "MXFP4": 32, "FP8 blocks": 128}.get(name, whole)
    codes = torch.randint(120 if name.startswith("FP8") else 2**bits, shape, dtype=torch.uint8, device=device)

    def of_groups(size: int, dtype: torch.dtype) -> Tensor:
        return torch.ones((*shape[:-1], -(-whole // size)), dtype=dtype, device=device)

    weight = QuantizedWeight(codes, bits, group, of_groups(group, torch.float16), zeros=1 << (bits - 1))
    if name == "GPTQ g128":
        weight = weight._replace(zeros=of_groups(group, torch.uint8), scales=0.3 * weight.scales)
    elif name in ("Q4_K", "Q6_K"):
        weight = weight._replace(scales=of_groups(group, torch.uint8), super_scales=of_groups(256, torch.float16))
        if name == "Q4_K":
            least, above = of_groups(group, torch.uint8), of_groups(256, torch.float16)
            weight = weight._replace(zeros=0, minimums=least, super_minimums=above)
    elif name in ("NF4", "MXFP4"):
        values = E2M1 if name == "MXFP4" else torch.linspace(-1, 1, 16)
        scale = 1.0 if name == "MXFP4" else 0.3
        weight = weight._replace(zeros=0, values=values, scales=scale * of_groups(group, torch.float32))
    elif name.startswith("FP8"):
        rounding = InputRounding("fp8_e4m3", group=128 if name == "FP8 blocks" else None)
        weight = weight._replace(zeros=0, values=E4M3, scales=0.3 * of_groups(group, torch.float32), inputs=rounding)
    elif name == "INT8 W8A8":
        weight = weight._replace(inputs=InputRounding("int8"))
    return pack_for_device(weight, device)


def copies(weight: DeviceWeight, count: int) -> list[DeviceWeight]:
    """The same weight at other places, so that none is found in a cache."""

    def copied(its: object) -> object:
        if isinstance(its, tuple) and not hasattr(its, "_fields"):
            return tuple(map(copied, its))
        return its.clone() if isinstance(its, Tensor) else its

    others = [DeviceWeight(*map(copied, weight)) for _ in range(count - 1)]  # type: ignore[arg-type]
    return [weight, *others]


def _case(name: str, rows: int, weight: DeviceWeight, dtype: torch.dtype, dry: bool) -> Case:
    num_outputs, num_inputs = weight.num_outputs, weight.num_inputs
    x = torch.randn(rows, num_inputs, device=weight.device, dtype=dtype)
    matrices = copies(weight, min(8, _rotations(dry, weight.num_bytes)))
    calls: Calls = [functools.partial(quantized_linear, x, its) for its in matrices]
    plain = torch.zeros(min(4, len(matrices)), num_outputs, num_inputs, device=weight.device, dtype=dtype)
    peer: Calls = [functools.partial(functional.linear, x, its) for its in plain]
    num_bytes = weight.num_bytes + rows * (num_inputs + num_outputs) * dtype.itemsize
    flops = 2 * rows * num_outputs * num_inputs
    return Case(f"{name}, T={rows}", num_bytes, calls, (("torch in bf16", peer),), flops)


def _mixture_case(weight: DeviceWeight, top_k: int, tokens: int, dtype: torch.dtype, dry: bool) -> Case:
    num_experts = weight.planes[0].shape[0]
    x = torch.randn(tokens, weight.num_inputs, device=weight.device, dtype=dtype)
    calls: Calls = []
    for _ in range(1 if dry else 8):
        ids = torch.rand(tokens, num_experts, device=weight.device).argsort(-1)[:, :top_k].int()
        grouped = group_rows(ids, num_experts)
        calls.append(functools.partial(grouped_quantized_linear, x, grouped, weight, of_tokens=True))
    share = 1 - (1 - top_k / num_experts) ** tokens  # of experts that are used, on the average
    rows = tokens * top_k
    num_bytes = (
        round(share * weight.num_bytes) + (tokens * weight.num_inputs + rows * weight.num_outputs) * dtype.itemsize
    )
    return Case(f"MXFP4 experts, T={tokens}", num_bytes, calls, (), 2 * rows * weight.num_outputs * weight.num_inputs)
