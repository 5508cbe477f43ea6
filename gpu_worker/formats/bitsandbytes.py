"""The format of bitsandbytes.

4 bits: w = values[code] * absmax[block], in the order of the matrix's elements. A byte has two codes, the first in the
upper half. If nested, absmax[b] = scale_values[absmax code[b]] * super_scales[b // 256] + offset.

8 bits: w[n, k] = codes[n, k] * SCB[n] / 127. LLM.int8 rounds inputs to 8 bits per token, and keeps outliers beyond a
threshold as floats. Here no input is rounded that coarsely, so outliers need no special treatment.
"""

import math
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.models.files.source import LoadError
from penstock.models.formats.bitsandbytes import BlocksMatrix, Int8Matrix
from penstock.models.weights.sources import WHOLE, Cut

_MAX_CODE = 127


class _State(msgspec.Struct):
    """The JSON object that bitsandbytes calls quant_state."""

    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def decode_blocks(format: BlocksMatrix, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    return decode_part(format, parts, WHOLE)


def decode_part(format: BlocksMatrix, parts: Mapping[str, Tensor], cut: Cut) -> QuantizedWeight:
    """The same for some outputs and inputs: the codes are only theirs, but all scales are given."""
    try:
        state = msgspec.json.decode(parts["state"].numpy().tobytes(), type=_State)
    except msgspec.MsgspecError as error:
        raise LoadError(f"the weights are damaged: a quant_state of bitsandbytes cannot be read ({error})") from None
    num_outputs, num_inputs = state.shape
    count = num_outputs * num_inputs
    num_blocks = -(-count // state.blocksize) if state.blocksize > 0 else 0
    absmax = _absmax(parts, state) if format.is_nested else parts["scales"]
    pairs, size = parts["codes"].flatten(), _size(cut, state.shape)
    if len(absmax) != num_blocks or len(pairs) != -(-size // 2):
        raise LoadError(f"the weights are damaged: a matrix {list(state.shape)} has {len(absmax)} scales")
    codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()[:size]
    # A block may span two rows, with a part in each. Groups are as large as such parts allow.
    group = math.gcd(state.blocksize, num_inputs, *(begin for begin, _ in cut.inputs or ()))
    scales = absmax.repeat_interleave(state.blocksize // group)[: count // group].view(num_outputs, -1)
    if cut.outputs is not None:
        scales = torch.cat([scales[begin:end] for begin, end in cut.outputs])
    if cut.inputs is not None:
        ((begin, end),) = cut.inputs
        scales = scales[:, begin // group : -(-end // group)]
    codes = codes.view(len(scales), -1)
    return QuantizedWeight(codes=codes, bits=4, group=group, scales=scales, values=parts["values"])


def _size(cut: Cut, shape: tuple[int, int]) -> int:
    """How many numbers are in the part."""
    sides = zip((cut.outputs, cut.inputs), shape, strict=True)
    return math.prod(size if its is None else sum(end - begin for begin, end in its) for its, size in sides)


def _absmax(parts: Mapping[str, Tensor], state: _State) -> Tensor:
    """fp32[blocks], the scales of blocks, from nested quantization."""
    found, large = parts["scale_values"][parts["scales"].int()], parts["super_scales"]
    if state.nested_blocksize < 1 or len(large) != -(-len(found) // state.nested_blocksize):
        raise LoadError(f"the weights are damaged: {len(found)} scales have {len(large)} scales")
    return found * large.repeat_interleave(state.nested_blocksize)[: len(found)] + state.nested_offset


def decode_int8(format: Int8Matrix, parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """As `Decode`."""
    layout = parts.get("layout")
    if layout is not None and int(layout) != 0:
        raise LoadError("a matrix of bitsandbytes INT8 is in the layout of one GPU: only that by rows is supported")
    codes, scales = parts["codes"], parts["scales"] / _MAX_CODE
    return QuantizedWeight(
        codes=codes.view(torch.uint8) + 128,
        bits=8,
        group=codes.shape[1],
        scales=scales.unsqueeze(1),
        zeros=128,
    )
