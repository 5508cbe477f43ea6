"""The Python side of the compiled kernels: structs of pointers, and a few functions."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.sampling_state import SamplingState

IntArray = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]

_WORTH_WAKING = 20e6  # half a millisecond on one core: anything shorter ends before a second one has helped much
_GROUP, _UNIT = 16, 64  # outputs of a weight stored together, and the multiple that they are padded to (linear.h)
_HUGE_PAGE = 2 << 20
_NO_MEMORY = 1
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")  # as enum Activation in dense.h
WEIGHT_KINDS = ("fp32", "bf16", "bf16_pairs")  # as enum WeightKind in linear.h

_SAMPLING_TABLES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "top_k", "min_tokens", "num_prompt_tokens"),
    *("token_ids", "stop_ids", "bias_ids", "bias_values"),
)


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("kind", c_int32),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", _Linear),
        ("o", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("window", c_int32),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden_size", "intermediate_size", "num_layers", "num_q_heads")),
        *((name, c_int32) for name in ("num_kv_heads", "head_dim", "vocab_size", "activation")),
        ("eps", c_float),
        ("scale", c_float),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        *((name, c_int32) for name in ("embedding_kind", "kv_is_bf16", "page_size", "num_pages")),
        ("layers", c_void_p),
        ("lm_head", _Linear),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_tokens", "num_rows", "rotary_dim", "page_table_stride")),
        *((name, c_void_p) for name in ("input_ids", "cos_sin", "slots", "query_start_loc", "seq_lens", "page_table")),
        ("kv", c_void_p),
        ("out", c_void_p),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in ("num_rows", "num_samples", "token_ids_stride", "page_table_stride", "rotary_dim")
        ),
        *((name, c_void_p) for name in ("rows", "start", "num_new", "samples", "token_ids", "page_table", "cos_sin")),
        ("kv", c_void_p),
    )


class _Sampling(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in _SAMPLING_TABLES),
        *((name, c_int32) for name in ("max_len", "num_stop_ids", "num_bias_ids")),
    )


class PackedLinear(NamedTuple):
    """A weight [N, K] in groups of 16 outputs, padded to whole units, as described in linear.h."""

    weight: Tensor  # uint8, starts at a huge page if it is large
    bias: Tensor | None  # fp32[num_packed]
    num_outputs: int  # N
    num_inputs: int  # K
    kind: str  # one of WEIGHT_KINDS
    interleaved: bool  # 16 gates, their 16 ups, the next 16 gates

    @property
    def num_packed(self) -> int:
        """Outputs with padding."""
        n = self.num_outputs
        return 2 * _round_up(n // 2, _UNIT // 2) if self.interleaved else _round_up(n, _UNIT)

    def plain_bias(self) -> Tensor | None:
        """fp32[N], as it was before packing."""
        if self.bias is None or not self.interleaved:
            return self.bias if self.bias is None else self.bias[: self.num_outputs]
        gates, ups = self.bias.view(-1, 2, _GROUP).unbind(1)
        half = self.num_outputs // 2
        return torch.cat((gates.flatten()[:half], ups.flatten()[:half]))

    def rows(self, ids: Tensor) -> Tensor:
        """int64[T] -> bf16[T, K]: these rows of a bf16 weight that is not interleaved."""
        groups = self.weight.view(torch.bfloat16).view(self.num_packed // _GROUP, -1, _GROUP, 2)
        return groups[ids // _GROUP, :, ids % _GROUP].flatten(1)[:, : self.num_inputs]


class StepTables(NamedTuple):
    """The tables from which a step reads its inputs."""

    token_ids: Tensor  # int32[R, L], known and sampled ids by position
    page_table: Tensor  # int32[R, max_pages]
    cos_sin: Tensor  # fp32[positions, rotary_dim], cosines in the first half of a row, sines in the second


class NativeLayer(NamedTuple):
    """One layer's weights; vectors are fp32."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear  # interleaved
    down: PackedLinear
    window: int | None


class NativeShape(NamedTuple):
    """What the kernels must know about a model."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    activation: str  # one of ACTIVATIONS
    eps: float


class NativeWeights(NamedTuple):
    """A whole model's weights."""

    embedding: Tensor | None  # [V, H] fp32 or bf16; None: the rows of lm_head
    layers: Sequence[NativeLayer]
    final_norm: Tensor  # fp32[H]
    lm_head: PackedLinear


class Library:
    """The functions of one compiled library. Not thread-safe."""

    def __init__(
        self, path: Path, num_threads: int, worth_waking: float = _WORTH_WAKING, *, leaves_long_steps: bool = False
    ) -> None:
        """Load it.

        Args:
            path: what `build` has compiled.
            num_threads: at most.
            worth_waking: number of multiplications in one call from which further threads take part.
            leaves_long_steps: whether torch computes long steps in bf16, because it is much faster there.
        """
        self.functions = ctypes.CDLL(str(path))
        for name in (
            "set_threads",
            "advise_huge_pages",
            "pack",
            "unpack",
            "forward",
            "step",
            "logits",
            "draw",
            "mask_tokens",
            "read",
            "attention",
        ):
            getattr(self.functions, f"penstock_{name}").restype = _checked
        self.functions.penstock_set_threads(c_int32(num_threads), ctypes.c_double(worth_waking))
        self.num_threads = num_threads
        self.leaves_long_steps = leaves_long_steps
        self.multiplies_bf16 = bool(self.functions.penstock_multiplies_pairs())

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, *, interleaved: bool = False, rounds_inputs: bool = False
    ) -> PackedLinear:
        """Copy a weight into the kernels' layout.

        Args:
            weight: [N, K], contiguous, fp32 or bf16.
            bias: [N] or None.
            interleaved: gates [N / 2, K] above ups; packed as 16 gates, their 16 ups, the next 16 gates.
            rounds_inputs: round inputs to bf16 before they are multiplied with a bf16 weight, which is fast where
                `multiplies_bf16`. Sums are fp32.
        """
        kind = _kind_of(weight, rounds_inputs=rounds_inputs)
        made = PackedLinear(torch.empty(0), None, weight.shape[0], weight.shape[1], kind, interleaved)
        num_packed, num_inputs = made.num_packed, made.num_inputs
        packed = self._memory(num_packed * (num_inputs * 4 if kind == "fp32" else (num_inputs + 1) // 2 * 4))
        weight = weight.contiguous()
        self.functions.penstock_pack(_address(weight), *_layout(made), _address(packed))
        if bias is not None:
            parts = bias.float().chunk(2 if interleaved else 1)
            padded = [functional.pad(part, (0, num_packed // len(parts) - len(part))) for part in parts]
            bias = torch.stack([part.view(-1, _GROUP) for part in padded], dim=1).flatten()
        return made._replace(weight=packed, bias=bias)

    def unpack(self, packed: PackedLinear, out: Tensor) -> None:
        """Write a weight [N, K] as it was before packing; `out` is contiguous and has its dtype."""
        self.functions.penstock_unpack(_address(packed.weight), *_layout(packed), _address(out))

    def _memory(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of untouched memory, on huge pages if it is large."""
        if num_bytes < _HUGE_PAGE:
            return torch.empty(num_bytes, dtype=torch.uint8)
        memory = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
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

    def mask_tokens(self, logits: Tensor, indices: IntArray, bits: IntArray) -> None:
        """Mask some rows in place, as `kernels/token_masks.py` does.

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

    def model(self, shape: NativeShape, weights: NativeWeights) -> "NativeModel":
        """A model ready to run."""
        return NativeModel(self.functions, shape, weights)


class NativeModel:
    """One model's forward pass."""

    def __init__(self, functions: ctypes.CDLL, shape: NativeShape, weights: NativeWeights) -> None:
        self._functions = functions
        self._shape = shape
        self._weights = weights  # keeps alive what the pointers below refer to
        self._layers = (_Layer * len(weights.layers))(*(_layer(layer) for layer in weights.layers))
        embedding = weights.embedding
        self._model = _Model(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=len(weights.layers),
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            activation=ACTIVATIONS.index(shape.activation),
            eps=shape.eps,
            scale=shape.head_dim**-0.5,
            final_norm=_pointer(weights.final_norm),
            embedding=_pointer(embedding),
            embedding_kind=0 if embedding is None else WEIGHT_KINDS.index(_kind_of(embedding)),
            layers=ctypes.addressof(self._layers),
            lm_head=_linear(weights.lm_head),
        )
        self._batch = _Batch()

    def forward(
        self,
        input_ids: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        kv: Tensor,
    ) -> Tensor:
        """Compute a ragged batch of T tokens in N rows, and write their keys and values.

        Args:
            input_ids: int32[T].
            cos_sin: fp32[T, rotary_dim], cosines in the first half of a row, sines in the second.
            slots: int64[T]; a negative one stores nothing.
            query_start_loc: int32[N + 1].
            seq_lens: int32[N].
            page_table: int32[N, max_pages].
            kv: [num_layers, 2, num_pages, Hk, page_size, D], fp32 or bf16.

        Returns:
            fp32[T, H], the final hidden states, normed.
        """
        batch = self._batch
        self._set_pages(kv)
        out = torch.empty(input_ids.shape[0], self._shape.hidden_size)
        batch.num_tokens, batch.num_rows = input_ids.shape[0], seq_lens.shape[0]
        batch.rotary_dim, batch.page_table_stride = cos_sin.shape[1], page_table.stride(0)
        batch.input_ids, batch.cos_sin, batch.slots = input_ids.data_ptr(), cos_sin.data_ptr(), slots.data_ptr()
        batch.query_start_loc, batch.seq_lens = query_start_loc.data_ptr(), seq_lens.data_ptr()
        batch.page_table, batch.kv, batch.out = page_table.data_ptr(), kv.data_ptr(), out.data_ptr()
        self._functions.penstock_forward(ctypes.byref(self._model), ctypes.byref(batch))
        return out

    def step(
        self,
        rows: Int32Array,
        start: Int32Array,
        num_new: Int32Array,
        samples: IntArray,
        tables: StepTables,
        kv: Tensor,
    ) -> Tensor:
        """Compute N rows, reading their inputs from the tables.

        Args:
            rows: int32[N].
            start: int32[N], the first position to compute.
            num_new: int32[N], how many to compute.
            samples: int64[S], ascending: which of the N rows sample.
            tables: of all rows.
            kv: as for `forward`.

        Returns:
            fp32[S, V], the logits of each sampling row's last position.
        """
        self._set_pages(kv)
        logits = torch.empty(samples.shape[0], self._shape.vocab_size)
        step = _Rows(
            rows.shape[0],
            samples.shape[0],
            tables.token_ids.stride(0),
            tables.page_table.stride(0),
            tables.cos_sin.shape[1],
            *(array.ctypes.data for array in (rows, start, num_new, samples)),
            *(tensor.data_ptr() for tensor in (*tables, kv)),
        )
        self._functions.penstock_step(ctypes.byref(self._model), ctypes.byref(step), c_void_p(logits.data_ptr()))
        return logits

    def _set_pages(self, kv: Tensor) -> None:
        model = self._model
        model.kv_is_bf16, model.num_pages, model.page_size = kv.dtype == torch.bfloat16, kv.shape[2], kv.shape[4]

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] -> fp32[S, V]"""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._shape.vocab_size)
        self._functions.penstock_logits(
            *(ctypes.byref(self._model), c_void_p(hidden.data_ptr())),
            *(c_int32(hidden.shape[0]), c_void_p(out.data_ptr())),
        )
        return out


class NativeSampler:
    """Samples like `kernels.sampling.sample`: all rows of a step in one call, by their parameters at that time."""

    def __init__(self, library: Library, state: SamplingState) -> None:
        self._functions = library.functions
        self._state = state  # keeps alive what the pointers below refer to
        widths = (tensor.shape[1] for tensor in (state.token_ids, state.stop_ids, state.bias_ids))
        self._sampling = _Sampling(*(getattr(state, name).data_ptr() for name in _SAMPLING_TABLES), *widths)

    def takes(self, logits: Tensor) -> bool:
        """Whether it can sample from these logits; torch's path can from any."""
        return logits.dtype == torch.float32 and logits.is_contiguous()

    def draw(self, logits: Tensor, rows: Int32Array, positions: Int32Array) -> Tensor:
        """Sample one token per row, and write it to its position of `token_ids`, like `sample`.

        Args:
            logits: fp32[S, V], contiguous; overwritten.
            rows: int32[S], the row of the state for each.
            positions: int32[S], where the sampled tokens go; those before are known.

        Returns:
            int32[S]; negative where there is no token.
        """
        num_rows, vocab_size = logits.shape
        if not self.takes(logits) or not rows.shape == positions.shape == (num_rows,):
            raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype} do not fit rows {rows.shape}")
        out = torch.empty(num_rows, dtype=torch.int32)
        self._functions.penstock_draw(
            *(ctypes.byref(self._sampling), c_void_p(rows.ctypes.data), c_void_p(positions.ctypes.data)),
            *(c_int32(num_rows), c_void_p(logits.data_ptr()), c_int32(vocab_size), c_void_p(out.data_ptr())),
        )
        return out


def _checked(answer: int) -> None:
    """Raise the error that a function's return value stands for (enum Answer in library.cpp)."""
    if answer == _NO_MEMORY:
        raise MemoryError("the CPU kernels ran out of memory")
    if answer:
        raise RuntimeError("the CPU kernels failed")


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _kind_of(weight: Tensor, *, rounds_inputs: bool = False) -> str:
    if weight.dtype != torch.bfloat16:
        return "fp32"
    return "bf16_pairs" if rounds_inputs else "bf16"


def _address(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def _layout(packed: PackedLinear) -> tuple[c_int32, ...]:
    kind = WEIGHT_KINDS.index(packed.kind)
    numbers = (packed.num_outputs, packed.num_inputs, kind, packed.interleaved, packed.num_packed)
    return tuple(c_int32(number) for number in numbers)


def _linear(packed: PackedLinear) -> _Linear:
    num_outputs = packed.num_packed if packed.interleaved else packed.num_outputs
    kind = WEIGHT_KINDS.index(packed.kind)
    return _Linear(_pointer(packed.weight), _pointer(packed.bias), num_outputs, packed.num_inputs, kind)


def _layer(layer: NativeLayer) -> _Layer:
    return _Layer(
        input_norm=_pointer(layer.input_norm),
        q_norm=_pointer(layer.q_norm),
        k_norm=_pointer(layer.k_norm),
        mlp_norm=_pointer(layer.mlp_norm),
        qkv=_linear(layer.qkv),
        o=_linear(layer.o),
        gate_up=_linear(layer.gate_up),
        down=_linear(layer.down),
        window=layer.window or 0,
    )
