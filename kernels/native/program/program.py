"""A program: a model's forward pass as one native call, and steps that read their inputs from tables (`program.h`)."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.native.library import (
    Int32Array,
    Library,
    LinearStruct,
    address_of,
)
from penstock.kernels.native.operations.structs import numbers, pointers
from penstock.kernels.native.pool import NativePool

IntArray = npt.NDArray[np.integer]


class ProgramStruct(ctypes.Structure):
    _fields_ = (
        *pointers("operations", "widths"),
        ("head", LinearStruct),
        *numbers("num_operations", "num_slots", "hidden_size", "packed_width"),
        *(("logit_scale", c_float), ("logit_softcap", c_float), ("adapters", c_void_p)),
    )


class _GroupPages(ctypes.Structure):
    _fields_ = (*pointers("slots", "page_table"), *numbers("page_table_stride"))


class _Rotary(ctypes.Structure):
    _fields_ = (*pointers("cos_sin"), *numbers("dim", "is_by_position"))


class _Batch(ctypes.Structure):
    _fields_ = (
        *numbers("num_tokens", "num_rows"),
        *pointers("input_ids", "positions", "query_start_loc", "seq_lens", "table_rows", "groups", "rotaries", "out"),
        *pointers("taps", "added"),
        *(("paths", c_void_p), ("path_stride", c_int32), ("state_rows", c_void_p), ("last_seen", c_void_p)),
        ("last_seen_in_windows", c_int32),
    )


class _PageTable(ctypes.Structure):
    _fields_ = (*pointers("pages"), *numbers("stride", "page_size"))


class _Rows(ctypes.Structure):
    _fields_ = (
        *numbers("num_rows", "num_samples", "token_ids_stride", "num_groups"),
        *pointers("rows", "start", "num_new", "samples", "token_ids", "page_tables", "rotaries", "hidden", "taps"),
        *(("paths", c_void_p), ("path_stride", c_int32)),
    )


class RotaryTable(NamedTuple):
    """The angles of one kind of rotation."""

    cos_sin: Tensor  # fp32[positions or T, rotary_dim]: cosines, then sines
    is_by_position: bool  # False: a row for each token


class GroupPages(NamedTuple):
    """Where a batch's tokens are in the pages of one page group."""

    slots: Tensor  # int64[T]; a negative one stores nothing
    page_table: Tensor  # int32[N, max_pages]


class Program:
    """A model's forward pass. Not thread-safe."""

    def __init__(self, library: Library, struct: ProgramStruct, kept: object) -> None:
        self._functions = library.functions
        self.struct = struct
        self._kept = kept  # keeps alive what the pointers refer to
        self._batch = _Batch()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        groups: Sequence[GroupPages],
        rotaries: Sequence[RotaryTable],
        pool: NativePool,
        given: Tensor | None = None,
        taps: Tensor | None = None,
        paths: Tensor | None = None,
        rows: Tensor | None = None,
        added: Tensor | None = None,
        last_seen: Tensor | None = None,
        *,
        last_seen_in_windows: bool = False,
    ) -> Tensor:
        """Compute a ragged batch of T tokens in N rows, and write their keys and values.

        Args:
            input_ids: int32[T].
            positions: int64[T].
            query_start_loc: int32[N + 1].
            seq_lens: int32[N].
            groups: one for each page group.
            rotaries: numbered as in the operations.
            pool: of all layers.
            given: [T, H], contiguous, the input of a program without an embedding; if fp32, it becomes the result.
            taps: fp32[T, .], filled with what `ProgramBuilder.tap` hands out.
            paths: as in `paged_attention`.
            rows: int32[N], the rows of the states; not needed if layers keep none.
            added: fp32[T, .], contiguous, what `ProgramBuilder.with_given` adds, in the order of places.
            last_seen: int32[T], the last position that each token sees, if that is not its own.
            last_seen_in_windows: whether that holds only for layers with a window.

        Returns:
            fp32[T, H].
        """
        batch, num_tokens = self._batch, input_ids.shape[0]
        out = torch.empty(num_tokens, self.struct.hidden_size) if given is None else given.float()
        group_structs = (_GroupPages * len(groups))(
            *(_GroupPages(slots.data_ptr(), table.data_ptr(), table.stride(0)) for slots, table in groups)
        )
        rotary_structs = _rotaries(rotaries)
        batch.num_tokens, batch.num_rows = num_tokens, seq_lens.shape[0]
        batch.input_ids, batch.positions = input_ids.data_ptr(), positions.data_ptr()
        batch.query_start_loc, batch.seq_lens = query_start_loc.data_ptr(), seq_lens.data_ptr()
        batch.groups, batch.rotaries = ctypes.addressof(group_structs), ctypes.addressof(rotary_structs)
        batch.out, batch.taps, batch.paths = out.data_ptr(), address_of(taps), address_of(paths)
        batch.added, batch.last_seen = address_of(added), address_of(last_seen)
        batch.last_seen_in_windows = last_seen_in_windows
        batch.path_stride, batch.state_rows = 0 if paths is None else paths.stride(0), address_of(rows)
        self._functions.penstock_forward(ctypes.byref(self.struct), ctypes.byref(pool.struct), ctypes.byref(batch))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] -> fp32[S, V]"""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self.struct.head.num_outputs)
        self._functions.penstock_logits(
            *(ctypes.byref(self.struct), c_void_p(hidden.data_ptr())),
            *(c_int32(hidden.shape[0]), c_void_p(out.data_ptr())),
        )
        return out

    def step(
        self, token_ids: Tensor, page_tables: Sequence[Tensor], rotaries: Sequence[Tensor], pool: NativePool
    ) -> "ProgramStep":
        """Steps that read their inputs from tables, with a row for each sequence.

        Args:
            token_ids: int32[R, L], known and sampled ids by position.
            page_tables: int32[R, max_pages] of each page group.
            rotaries: fp32[positions, rotary_dim] each, numbered as in the operations.
            pool: of all layers.
        """
        return ProgramStep(self._functions, self.struct, token_ids, page_tables, rotaries, pool)


class ProgramStep:
    """See `Program.step`."""

    def __init__(
        self,
        functions: ctypes.CDLL,
        program: ProgramStruct,
        token_ids: Tensor,
        page_tables: Sequence[Tensor],
        rotaries: Sequence[Tensor],
        pool: NativePool,
    ) -> None:
        self._functions = functions
        self.program = program
        self.pool = pool
        tables = (_PageTable * len(page_tables))(
            *(
                _PageTable(table.data_ptr(), table.stride(0), pool.page_sizes[group])
                for group, table in enumerate(page_tables)
            )
        )
        rotary_structs = _rotaries([RotaryTable(table, is_by_position=True) for table in rotaries])
        self._kept = (token_ids, page_tables, rotaries, tables, rotary_structs)  # keeps these alive for pointers
        self.rows = _Rows(
            token_ids_stride=token_ids.stride(0),
            num_groups=len(page_tables),
            token_ids=token_ids.data_ptr(),
            page_tables=ctypes.addressof(tables),
            rotaries=ctypes.addressof(rotary_structs),
        )

    def compute(
        self,
        rows: Int32Array,
        start: Int32Array,
        num_new: Int32Array,
        samples: IntArray,
        given: Tensor | None = None,
        hidden: Tensor | None = None,
        taps: Tensor | None = None,
        paths: Int32Array | None = None,
    ) -> Tensor:
        """Compute N rows.

        Args:
            rows: int32[N].
            start: int32[N], the first position to compute.
            num_new: int32[N], how many to compute.
            samples: int64[S], ascending: which of the N rows sample.
            given: as in `Program.forward`.
            hidden: fp32[T, H], filled with the hidden states of all positions, if nothing is given.
            taps: as in `Program.forward`.
            paths: int32[N, 1 + D], contiguous, as in `paged_attention`; a token's id is at its place, too.

        Returns:
            fp32[S, V], the logits of each sampling row's last position; or, from a program without a head, fp32[T, H],
            the hidden states of all positions.
        """
        step, num_outputs = self.rows, self.program.head.num_outputs
        hidden = hidden if given is None else given.float()
        if hidden is None and not num_outputs:
            hidden = torch.empty(int(num_new.sum()), self.program.hidden_size)
        step.hidden, step.taps = address_of(hidden), address_of(taps)
        step.num_rows, step.num_samples = rows.shape[0], samples.shape[0]
        step.rows, step.start, step.num_new = rows.ctypes.data, start.ctypes.data, num_new.ctypes.data
        step.samples, step.paths = samples.ctypes.data, None if paths is None else paths.ctypes.data
        step.path_stride = 0 if paths is None else paths.shape[1]
        logits = torch.empty(samples.shape[0], num_outputs) if num_outputs else None
        self._functions.penstock_step(
            *(ctypes.byref(self.program), ctypes.byref(self.pool.struct), ctypes.byref(step)),
            c_void_p(address_of(logits)),
        )
        out = hidden if logits is None else logits
        assert out is not None
        return out


def _rotaries(tables: Sequence[RotaryTable]) -> "ctypes.Array[_Rotary]":
    return (_Rotary * len(tables))(
        *(_Rotary(table.cos_sin.data_ptr(), table.cos_sin.shape[1], table.is_by_position) for table in tables)
    )
