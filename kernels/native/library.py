"""The compiled kernels as functions of tensors; `program.py` makes them compute a model."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_void_p
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.native.quantized.layout import (
    INPUT_BLOCK_FLOATS,
    Quantization,
    QuantizedStruct,
    kind_of_product,
    prepared,
    round_up,
)
from penstock.kernels.quantized.weight import QuantizedWeight
from penstock.kernels.sampling.sampling_state import SamplingState

IntArray = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]

_WORTH_WAKING = 20e6  # half a millisecond on one core; shorter work ends before a second core helps much
_GROUP, UNIT = 16, 64  # outputs of a weight stored together, and the multiple that they are padded to (linear.h)
_HUGE_PAGE = 2 << 20
_NO_MEMORY, _GIVEN_UP = 1, 3  # as enum Answer in library.cpp
WEIGHT_KINDS = (  # as enum WeightKind in linear.h
    *("fp32", "bf16", "bf16_pairs"),
    *("quantized_int8", "quantized_fp32", "quantized_bf16"),
)


class LinearStruct(ctypes.Structure):
    """As Linear in linear.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("kind", c_int32),
        ("quantized", c_void_p),
    )


class _Sampling(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in SamplingState._fields),  # as struct Sampling in sampling.h
        *((name, c_int32) for name in ("max_len", "num_stop_ids", "num_bias_ids")),
    )


class PackedLinear(NamedTuple):
    """A weight [N, K] in groups of 16 outputs, padded to whole units; see linear.h and layout.h."""

    weight: Tensor  # uint8, starts at a huge page if it is large
    bias: Tensor | None  # fp32[num_packed]
    num_outputs: int  # N
    num_inputs: int  # K
    kind: str  # one of WEIGHT_KINDS
    interleaved: bool  # 16 gates, their 16 ups, the next 16 gates
    quantization: Quantization | None = None  # of a quantized weight
    site: int = -1  # which of the products that adapters add to; negative: none

    @property
    def num_packed(self) -> int:
        """Outputs with padding."""
        n = self.num_outputs
        return 2 * round_up(n // 2, UNIT // 2) if self.interleaved else round_up(n, UNIT)

    @property
    def packed_width(self) -> int:
        """Room that a product needs for each token's inputs, in floats."""
        if self.quantization is None or self.kind != "quantized_int8":
            return round_up(self.num_inputs, UNIT)
        block = int(self.quantization.struct.block)
        return -(-self.num_inputs // block) * INPUT_BLOCK_FLOATS

    @property
    def struct(self) -> LinearStruct:
        """Points into this object, which must outlive it."""
        num_outputs = self.num_packed if self.interleaved else self.num_outputs
        kind = WEIGHT_KINDS.index(self.kind)
        quantized = None if self.quantization is None else ctypes.addressof(self.quantization.struct)
        pointers = (address_of(self.weight), address_of(self.bias))
        return LinearStruct(*pointers, num_outputs, self.num_inputs, kind, quantized)

    def padded(self, of_outputs: Tensor) -> Tensor:
        """fp32[N] -> fp32[num_packed], in the order of packed outputs."""
        parts = of_outputs.float().chunk(2 if self.interleaved else 1)
        padded = [functional.pad(part, (0, self.num_packed // len(parts) - len(part))) for part in parts]
        return torch.stack([part.view(-1, _GROUP) for part in padded], dim=1).flatten()

    def plain_bias(self) -> Tensor | None:
        """fp32[N], as it was before packing."""
        if self.bias is None or not self.interleaved:
            return self.bias if self.bias is None else self.bias[: self.num_outputs]
        gates, ups = self.bias.view(-1, 2, _GROUP).unbind(1)
        half = self.num_outputs // 2
        return torch.cat((gates.flatten()[:half], ups.flatten()[:half]))


class Library:
    """The functions of one compiled library. Not thread-safe."""

    def __init__(self, path: Path, num_threads: int, worth_waking: float = _WORTH_WAKING) -> None:
        """Load the library.

        Args:
            path: of the library that `build` has compiled.
            num_threads: the most threads to use.
            worth_waking: number of multiplications in one call from which further threads take part.
        """
        self.functions = ctypes.CDLL(str(path))
        self.reason: BaseException | None = None
        """Set by a function that a call asks, if the call must end before its work is done; the call raises it."""
        for name in (
            "set_threads",
            "advise_huge_pages",
            "pack",
            "pack_quantized",
            "unpack",
            "unpack_quantized",
            "rows",
            "forward",
            "count_layers",
            "step",
            "logits",
            "meet",
            "add_up",
            "gather",
            "broadcast",
            "draw",
            "log_sum_exp",
            "guess",
            "keep",
            "mask_tokens",
            "read",
            "linear",
            "activate",
            "attention",
            "route",
            "experts",
            "latent_attention",
            "choose",
        ):
            getattr(self.functions, f"penstock_{name}").restype = self._checked
        self.functions.penstock_panel_bytes.restype = ctypes.c_size_t
        self.functions.penstock_set_threads(c_int32(num_threads), ctypes.c_double(worth_waking))
        self._counter: npt.NDArray[np.int64] | None = None
        self.name = path.stem
        """The name of the library, which identifies sources, compiler and processor."""
        self.num_threads = num_threads
        self.multiplies_bf16 = bool(self.functions.penstock_multiplies_pairs())
        """Whether one instruction multiplies pairs of bf16. If it is set to true, several instructions emulate it."""
        self.multiplies_tiles = bool(self.functions.penstock_multiplies_tiles())
        """Whether one instruction multiplies tiles of bf16 matrices (AMX); then it computes all pairs of bf16."""

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, *, interleaved: bool = False, rounds_inputs: bool = False
    ) -> PackedLinear:
        """Copy a weight into the kernels' layout.

        Args:
            weight: [N, K], contiguous, fp32 or bf16.
            bias: [N] or None.
            interleaved: gates [N / 2, K] above ups; packed as 16 gates, their 16 ups, the next 16 gates.
            rounds_inputs: round inputs to bf16 before they are multiplied with a bf16 weight, where `multiplies_bf16`.
                Sums are fp32.
        """
        kind = kind_of(weight, rounds_inputs=rounds_inputs and self.multiplies_bf16)
        made = PackedLinear(torch.empty(0), None, weight.shape[0], weight.shape[1], kind, interleaved)
        num_packed, num_inputs = made.num_packed, made.num_inputs
        packed = self._memory(num_packed * (num_inputs * 4 if kind == "fp32" else (num_inputs + 1) // 2 * 4))
        weight = weight.contiguous()
        self.functions.penstock_pack(_address(weight), *_layout(made), _address(packed))
        return made._replace(weight=packed, bias=None if bias is None else made.padded(bias))

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        interleaved: bool = False,
        rounds_inputs: bool = False,
    ) -> PackedLinear:
        """Copy a quantized weight into the layout of layout.h.

        Args:
            weight: one matrix, on the CPU.
            bias: [N] or None.
            interleaved: as for `pack`.
            rounds_inputs: round inputs, if the weight does not say how. For integers, inputs are rounded to int8, with
                a scale for each 32 of a token; for other values, to bf16 if `multiplies_bf16`. Otherwise weights are
                multiplied as the floats that they stand for.

        Raises:
            UnsupportedWeightError: if there is no layout for the weight.
        """
        kind = kind_of_product(weight, rounds_inputs=rounds_inputs, multiplies_bf16=self.multiplies_bf16)
        source = prepared(weight, kind)
        num_outputs, num_inputs = weight.codes.shape
        made = PackedLinear(torch.empty(0), None, num_outputs, num_inputs, kind, interleaved)
        scales = made.padded(source.scales[:, 0]) if source.has_output_scales else None
        struct = QuantizedStruct.from_buffer_copy(source.struct)
        struct.output_scales, struct.order = address_of(scales), address_of(source.order)
        struct.values, struct.pair_bytes = address_of(source.values), address_of(source.pair_bytes)
        num_bytes = self.functions.penstock_panel_bytes(ctypes.byref(struct), c_int32(made.num_inputs))
        packed = self._memory(num_bytes * (made.num_packed // _GROUP))
        self.functions.penstock_pack_quantized(
            *(ctypes.byref(struct), ctypes.byref(source.pointers()), c_int32(interleaved), c_int32(made.num_packed)),
            _address(packed),
        )
        quantization = Quantization(struct, scales, source.order, (source.values, source.pair_bytes))
        bias = None if bias is None else made.padded(bias)
        return made._replace(weight=packed, bias=bias, quantization=quantization)

    def unpack(self, packed: PackedLinear, out: Tensor) -> None:
        """Write a weight [N, K] as it was before packing.

        Args:
            packed: the weight.
            out: contiguous, in the weight's dtype; for a quantized weight fp32, or bf16 with rounding.
        """
        if packed.quantization is not None:
            numbers = (packed.num_outputs, packed.interleaved, packed.num_packed, out.dtype == torch.bfloat16)
            self.functions.penstock_unpack_quantized(
                ctypes.byref(packed.struct), *(c_int32(number) for number in numbers), _address(out)
            )
            return
        self.functions.penstock_unpack(_address(packed.weight), *_layout(packed), _address(out))

    def linear(self, packed: PackedLinear, x: Tensor) -> Tensor:
        """A product alone, outside of a program.

        Args:
            packed: [N, K], not interleaved.
            x: fp32[T, K].

        Returns:
            fp32[T, N]; its rows may be apart.
        """
        if x.dtype != torch.float32 or x.ndim != 2 or x.shape[1] != packed.num_inputs or packed.interleaved:
            raise ValueError(f"{tuple(x.shape)} of {x.dtype} does not fit a weight of {packed.num_inputs} inputs")
        padded = functional.pad(x, (0, -x.shape[1] % UNIT)) if x.shape[1] % UNIT else x.contiguous()
        room, out = torch.empty(len(x), packed.packed_width), torch.empty(len(x), packed.num_packed)
        self.functions.penstock_linear(
            *(ctypes.byref(packed.struct), _address(padded), c_int32(padded.shape[1]), c_int32(len(x))),
            *(_address(room), _address(out), c_int32(out.shape[1])),
        )
        return out[:, : packed.num_outputs]

    def rows(self, packed: PackedLinear, ids: Tensor) -> Tensor:
        """Rows of a weight that is not interleaved.

        Args:
            packed: [N, K].
            ids: int64[T], each in [0, N).

        Returns:
            fp32[T, K].
        """
        out = torch.empty(len(ids), packed.num_inputs)
        self.functions.penstock_rows(
            ctypes.byref(packed.struct), _address(ids.contiguous()), c_int32(len(ids)), _address(out)
        )
        return out

    def _memory(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of untouched memory, on huge pages if it is large."""
        if num_bytes < _HUGE_PAGE:
            return torch.empty(num_bytes, dtype=torch.uint8)
        # Not from malloc: the bytes skipped for alignment could be memory in use before, which would stay resident.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=private), dtype=torch.uint8)
        skipped = -memory.data_ptr() % _HUGE_PAGE
        aligned = memory[skipped : skipped + num_bytes]
        self.advise_huge_pages(aligned)
        return aligned

    def advise_huge_pages(self, memory: Tensor) -> None:
        """Ask the system to back an untouched tensor with huge pages, as far as it covers whole ones."""
        begin = memory.data_ptr() + -memory.data_ptr() % _HUGE_PAGE
        num_bytes = memory.data_ptr() + memory.nbytes - begin
        if num_bytes >= _HUGE_PAGE:
            self.functions.penstock_advise_huge_pages(c_void_p(begin), ctypes.c_size_t(num_bytes))

    def count_layers(self, counter: npt.NDArray[np.int64] | None) -> None:
        """Let each step write to `counter` [1] how many of its layers have written their keys and values.

        The counter must live until it is replaced.
        """
        self._counter = counter
        self.functions.penstock_count_layers(c_void_p(None if counter is None else counter.ctypes.data))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Steps in this context are not counted, because they belong to another model."""
        counter = self._counter
        if counter is None:
            yield
            return
        self.count_layers(None)
        try:
            yield
        finally:
            self.count_layers(counter)

    def mask_tokens(self, logits: Tensor, indices: IntArray, bits: IntArray) -> None:
        """Mask some rows in place, as `kernels/sampling/token_masks.py` does.

        Args:
            logits: fp32[S, V], contiguous.
            indices: int64[C], the masked rows.
            bits: int32[C, ceil(V / 32)], contiguous.
        """
        if not logits.is_contiguous() or bits.shape != (indices.shape[0], -(-logits.shape[1] // 32)):
            raise ValueError(f"bits {bits.shape} of {indices.shape[0]} rows do not fit logits {tuple(logits.shape)}")
        self.functions.penstock_mask_tokens(
            *(c_void_p(logits.data_ptr()), c_int32(logits.shape[1])),
            *(c_void_p(indices.ctypes.data), c_int32(indices.shape[0]), c_void_p(bits.ctypes.data)),
        )

    def read(self, data: Tensor) -> None:
        """Read a tensor from memory, to measure how fast that is.

        Args:
            data: fp32, contiguous; a multiple of 65,536 numbers.
        """
        if data.dtype != torch.float32 or not data.is_contiguous() or data.numel() % (1 << 16):
            raise ValueError(f"cannot read {data.numel()} of {data.dtype}: need a multiple of 65,536 fp32 numbers")
        self.functions.penstock_read(c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel()))

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """log(sum(exp(logits))) of each row, with the same bits in any batch and with any number of threads.

        Args:
            logits: fp32[S, V], contiguous.

        Returns:
            fp32[S].
        """
        if logits.dtype != torch.float32 or logits.ndim != 2 or not logits.is_contiguous():
            raise ValueError(f"cannot add up {tuple(logits.shape)} of {logits.dtype}: need contiguous fp32 rows")
        num_rows, vocab_size = logits.shape
        out = torch.empty(num_rows)
        self.functions.penstock_log_sum_exp(_address(logits), c_int32(num_rows), c_int32(vocab_size), _address(out))
        return out

    def _checked(self, answer: int) -> None:
        """Raise the error that a function's return value stands for."""
        if answer == _NO_MEMORY:
            raise MemoryError("the CPU kernels ran out of memory")
        if answer == _GIVEN_UP and self.reason is not None:
            reason, self.reason = self.reason, None
            raise reason
        if answer:
            raise RuntimeError("the CPU kernels failed")


class NativeSampler:
    """Samples like `kernels/sampling/sampling.py`: all rows of a step in one call, with their present parameters."""

    def __init__(self, library: Library, state: SamplingState) -> None:
        self._functions = library.functions
        self._state = state  # keeps alive what the pointers below refer to
        widths = (tensor.shape[1] for tensor in (state.token_ids, state.stop_ids, state.bias_ids))
        self.struct = _Sampling(*(tensor.data_ptr() for tensor in state), *widths)

    def takes(self, logits: Tensor) -> bool:
        """Whether it can sample from these logits; torch's path takes any logits."""
        return logits.dtype == torch.float32 and logits.is_contiguous()

    def draw(self, logits: Tensor, rows: Int32Array, positions: Int32Array) -> Tensor:
        """Sample one token per row, and write it to its position of `token_ids`, like `sample`.

        Args:
            logits: fp32[S, V], contiguous; overwritten.
            rows: int32[S], the row of the state for each.
            positions: int32[S], where the sampled tokens go; the tokens before them are known.

        Returns:
            int32[S]; negative where there is no token.
        """
        num_rows, vocab_size = logits.shape
        if not self.takes(logits) or not rows.shape == positions.shape == (num_rows,):
            raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype} do not fit rows {rows.shape}")
        out = torch.empty(num_rows, dtype=torch.int32)
        self._functions.penstock_draw(
            *(ctypes.byref(self.struct), c_void_p(rows.ctypes.data), c_void_p(positions.ctypes.data)),
            *(c_int32(num_rows), c_void_p(logits.data_ptr()), c_int32(vocab_size), c_void_p(out.data_ptr())),
        )
        return out


def address_of(tensor: Tensor | None) -> int | None:
    """The address of a tensor's numbers."""
    return None if tensor is None else tensor.data_ptr()


def kind_of(weight: Tensor, *, rounds_inputs: bool = False) -> str:
    """One of WEIGHT_KINDS."""
    if weight.dtype != torch.bfloat16:
        return "fp32"
    return "bf16_pairs" if rounds_inputs else "bf16"


def _address(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def _layout(packed: PackedLinear) -> tuple[c_int32, ...]:
    kind = WEIGHT_KINDS.index(packed.kind)
    numbers = (packed.num_outputs, packed.num_inputs, kind, packed.interleaved, packed.num_packed)
    return tuple(c_int32(number) for number in numbers)
