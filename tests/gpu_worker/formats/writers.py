"""Writers of quantized checkpoints: each stores a matrix as its format's tool does, and says which floats that means.

Numbers are rounded to the nearest. What is packed is packed here as the tools describe it, one bit after the other,
apart from compressed-tensors, whose own library does it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs  # a machine with a GPU may lack it

Stored = dict[str, Tensor]
_MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
_OF_BITSANDBYTES = load_file(Path(__file__).parent / "written" / "bnb-nf4-nested.safetensors")


class Writer(NamedTuple):
    """One format with its variables."""

    config: dict[str, Any]
    """quantization_config."""
    write: Callable[[str, Tensor], tuple[Stored, Tensor]]
    """A weight's name and the weight, [..., out, in] -> what is stored, and the same as floats."""
    rounded: Callable[[Tensor], Tensor] | None = None
    """What inputs [..., K] of products are rounded to; None: they are not."""
    quantizes: Callable[[str], bool] = lambda name: name.endswith(_MATRICES)
    """Whether a stored weight is quantized, by its name."""


def packed(codes: Tensor, bits: int) -> Tensor:
    """int32[..., words], of codes along the last axis, the lowest bit first."""
    each = (codes.long().unsqueeze(-1) >> torch.arange(bits)) & 1
    stream = each.flatten(-2)
    words: Tensor = functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    return (words << torch.arange(32)).sum(-1).int()


def _asymmetric(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales (of fp16) and zero points of groups, over the last axis."""
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    codes = (groups / scales + zeros).round().clamp(0, 2**bits - 1)
    return codes, scales.squeeze(-1), zeros.squeeze(-1)


def _in_groups(matrix: Tensor, size: int) -> Tensor:
    """[N, J, size]; the last group may repeat its last number."""
    padding = -matrix.shape[-1] % size
    padded = torch.cat((matrix, matrix[..., -1:].expand(*matrix.shape[:-1], padding)), -1)
    return padded.view(*padded.shape[:-1], -1, size)


def gptq(bits: int = 4, group_size: int = 32, version: int = 1, has_order: bool = False) -> Writer:
    """GPTQ; with an order, inputs are assigned to groups at random."""

    def write(name: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        num_inputs = matrix.shape[1]
        size = num_inputs if group_size == -1 else group_size
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
        order = order if has_order else torch.arange(num_inputs)
        codes, scales, zeros = _asymmetric(_in_groups(matrix[:, order], size), bits)
        place = order.argsort()
        group = place // size
        codes = codes.flatten(1)[:, place]
        plain = (codes - zeros[:, group]) * scales[:, group]
        words = packed(zeros.T, bits)
        if version == 1:
            words = (words.long() - {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]).int()
        stem = name.removesuffix(".weight")
        return {
            f"{stem}.qweight": packed(codes, bits).T.contiguous(),
            f"{stem}.qzeros": words,
            f"{stem}.scales": scales.T.half().contiguous(),
            f"{stem}.g_idx": group.int(),
            f"{stem}.bias": torch.zeros(len(matrix)).half(),  # as AutoGPTQ does
        }, plain

    layout = {1: "gptq", 2: "gptq_v2"}[version]
    sizes = {"bits": bits, "group_size": group_size, "desc_act": has_order, "sym": False}
    return Writer({"quant_method": "gptq", "checkpoint_format": layout, **sizes}, write)


def awq(group_size: int = 32) -> Writer:
    """AWQ in the layout gemm."""

    def write(name: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        size = matrix.shape[1] if group_size == -1 else group_size
        codes, scales, zeros = _asymmetric(_in_groups(matrix, size), 4)
        plain = ((codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(1)[:, : matrix.shape[1]]

        def words(by_output: Tensor) -> Tensor:
            eights = by_output.T.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]
            return packed(eights.flatten(-2), 4)

        stem = name.removesuffix(".weight")
        return {
            f"{stem}.qweight": words(codes.flatten(1)[:, : matrix.shape[1]]),
            f"{stem}.qzeros": words(zeros),
            f"{stem}.scales": scales.T.half().contiguous(),
        }, plain

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Writer(config, write)


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Writer:
    """compressed-tensors, by its library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
        format=layout,
    )
    compressor = BaseCompressor.get_value_from_registry(layout)
    is_static = inputs is not None and not inputs.get("dynamic")

    def write(name: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        scale, zero_point = calibrated(matrix, scheme.weights)
        state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero_point}
        written = compressor.compress(state, scheme)
        plain = compressor.decompress(written, scheme)["weight"]
        if is_static:
            written["input_scale"] = torch.tensor([_STATIC_SCALE])
        stem = name.removesuffix(".weight")
        return {f"{stem}.{key}": tensor.contiguous() for key, tensor in written.items()}, plain

    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump()},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    if inputs is None:
        return Writer(config, write)
    static = _STATIC_SCALE if is_static else None
    rounded = round_to_int8 if inputs["type"] == "int" else round_to_fp8
    return Writer(config, write, lambda x: rounded(x, inputs.get("group_size"), static))


def calibrated(weight: Tensor, args: "QuantizationArgs") -> tuple[Tensor, Tensor]:
    """The library's scales and zero points for a matrix."""
    from compressed_tensors.quantization.utils import calculate_qparams

    num_outputs, num_inputs = weight.shape
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = functional.pad(weight, (0, -num_inputs % columns, 0, -num_outputs % rows))
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        groups = {"group": _in_groups(weight, args.group_size or num_inputs), "channel": weight.unsqueeze(1)}
        its = groups.get(args.strategy, weight.flatten()[None, None])
        low, high = its.amin(-1), its.amax(-1)
    scale, zero_point = calculate_qparams(low, high, args)
    is_one = args.strategy == "tensor"
    return (scale.reshape(1), zero_point.reshape(1)) if is_one else (scale, zero_point)


def fp8(block: int | None = 32) -> Writer:
    """FP8 in square blocks with dynamic scales of inputs; else with one scale for each matrix, and a static one."""

    def write(name: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = (block, block) if block is not None else matrix.shape
        padded = functional.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
        scales = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: len(matrix), : matrix.shape[1]]
        codes = (matrix / spread).to(torch.float8_e4m3fn)
        stored = {name: codes, f"{name}_scale_inv": scales if block is not None else scales.reshape(())}
        if block is None:
            stored[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor(_STATIC_SCALE)
        return stored, codes.float() * spread

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["weight_block_size"] = None if block is None else [block, block]
    config["modules_to_not_convert"] = ["lm_head", "mlp.gate"]
    if block is not None:
        return Writer(config, write, lambda x: round_to_fp8(x, block, None))
    return Writer({**config, "activation_scheme": "static"}, write, lambda x: round_to_fp8(x, None, _STATIC_SCALE))


def nf4() -> Writer:
    """bitsandbytes NF4, with scales that are quantized, too."""
    table, scale_table = _OF_BITSANDBYTES["weight.quant_map"], _OF_BITSANDBYTES["weight.nested_quant_map"]

    def write(name: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        blocks = _in_groups(matrix.flatten(), 64)
        absmax = blocks.abs().amax(-1)
        offset = float(absmax.mean())
        large = _in_groups(absmax - offset, 256).abs().amax(-1)
        of_large = large.repeat_interleave(256)[: len(absmax)]
        scale_codes = ((absmax - offset) / of_large).unsqueeze(-1).sub(scale_table).abs().argmin(-1)
        scales = scale_table[scale_codes] * of_large + offset
        codes = (blocks / scales.unsqueeze(-1)).unsqueeze(-1).sub(table).abs().argmin(-1)
        plain = (table[codes] * scales.unsqueeze(-1)).flatten()[: matrix.numel()].view_as(matrix)
        pairs = codes.flatten()[: matrix.numel()].view(-1, 2)
        state = (
            f'{{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": {list(matrix.shape)}, '
            f'"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": {offset!r}}}'
        )
        return {
            name: (pairs[:, :1] * 16 + pairs[:, 1:]).byte(),
            f"{name}.absmax": scale_codes.byte(),
            f"{name}.quant_map": table.clone(),
            f"{name}.nested_absmax": large,
            f"{name}.nested_quant_map": scale_table.clone(),
            f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
        }, plain

    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8"}
    return Writer({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": None, **kind}, write)


def int8() -> Writer:
    """bitsandbytes INT8."""

    def write(name: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        scb = matrix.abs().amax(1)
        codes = (matrix * 127 / scb.unsqueeze(1)).round()
        stem = name.removesuffix(".weight")
        layout = torch.tensor(0, dtype=torch.uint8)
        stored = {name: codes.to(torch.int8), f"{stem}.SCB": scb, f"{stem}.weight_format": layout}
        return stored, codes * (scb / 127).unsqueeze(1)

    return Writer({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, write)


def mxfp4() -> Writer:
    """MXFP4 of all experts' matrices, which are there as [experts, in, out]."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat((table, -table))

    def write(name: str, matrices: Tensor) -> tuple[Stored, Tensor]:
        blocks = matrices.mT.unflatten(-1, (-1, 32))
        exponents = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
        scales = exponents.exp2().unsqueeze(-1)
        codes = (blocks / scales).unsqueeze(-1).sub(table).abs().argmin(-1)
        plain = (table[codes] * scales).flatten(-2).mT.contiguous()
        pairs = codes.unflatten(-1, (-1, 2)).byte()
        return {f"{name}_blocks": pairs[..., 0] + pairs[..., 1] * 16, f"{name}_scales": (exponents + 127).byte()}, plain

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return Writer(config, write, quantizes=lambda name: name.endswith(("gate_up_proj", "down_proj")))


_STATIC_SCALE = 2.0**-5


def round_to_int8(x: Tensor, group: int | None, scale: float | None, largest: float = 127.0) -> Tensor:
    """To the nearest multiple of a scale, so that the largest number is `largest` of it."""
    return _by_groups(x, group, largest, scale, lambda its: its.round().clamp(-128, 127))


def round_to_fp8(x: Tensor, group: int | None, scale: float | None) -> Tensor:
    """To the nearest number of e4m3, times a scale."""
    return _by_groups(x, group, 448.0, scale, lambda its: its.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def _by_groups(
    x: Tensor, group: int | None, largest: float, scale: float | None, rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    groups = _in_groups(x, group or x.shape[-1])
    scales = groups.abs().amax(-1, keepdim=True) / largest if scale is None else torch.tensor(scale)
    scales = torch.where(scales == 0, 1.0, scales)
    return (rounded(groups / scales) * scales).flatten(-2)[..., : x.shape[-1]]
