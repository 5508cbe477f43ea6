"""The Python side of heads that guess token by token: all guesses of a step in one call (`chain.h`)."""

import ctypes
from ctypes import c_int32, c_void_p
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.native.library import Int32Array, Library, NativeSampler, address_of
from penstock.kernels.native.operations.structs import NormWeightsStruct, numbers, pointers
from penstock.kernels.native.program.builder import norm_struct
from penstock.kernels.native.program.program import Program, ProgramStep
from penstock.kernels.norms import NormWeights


class _Chain(ctypes.Structure):
    _fields_ = (
        *pointers("layers", "output", "pool"),
        ("norm", NormWeightsStruct),
        *pointers("token_ids", "kept", "kept_positions", "num_done"),
        *numbers("vocab_size", "num_kept", "kept_is_bf16"),
    )


class Output(NamedTuple):
    """From a head's output to logits."""

    program: Program  # its output matrix
    norm: NormWeights | None  # before the output matrix
    token_ids: Tensor | None  # int64, the token of each output; None: output t is token t
    vocab_size: int


class Kept(NamedTuple):
    """What is kept for R rows between steps."""

    states: Tensor  # [R * W, H], fp32 or bf16, the model's last hidden states; that of position p is at p % W
    positions: Int32Array  # [R, W], the positions of the states
    num_done: Int32Array  # [R], the first position that the head's layers may not have computed


class HeadChain:
    """A head over the rows of a model's state."""

    def __init__(self, library: Library, step: ProgramStep, output: Output, kept: Kept) -> None:
        """`step`: the step of the head's layers; its token ids are those after each position."""
        self._functions = library.functions
        self._rows = step.rows
        self._kept: list[object] = [step, output, kept]  # what the pointers refer to
        self._chain = _Chain(
            *(ctypes.addressof(each) for each in (step.program, output.program.struct, step.pool.struct)),
            norm_struct(output.norm, self._kept),
            *(address_of(output.token_ids), kept.states.data_ptr()),
            *(kept.positions.ctypes.data, kept.num_done.ctypes.data),
            *(output.vocab_size, kept.positions.shape[1], kept.states.dtype == torch.bfloat16),
        )

    def keep_last(self, rows: Int32Array, start: Int32Array, num_new: Int32Array, hidden: Tensor) -> None:
        """Keep the hidden state of the last position that each of N rows has computed.

        Args:
            rows: int32[N]; all arrays are contiguous.
            start: int32[N], their first positions.
            num_new: int32[N], how many positions each has computed (T in all).
            hidden: fp32[T, H].
        """
        self._functions.penstock_keep(
            *(ctypes.byref(self._chain), c_int32(rows.shape[0]), c_void_p(rows.ctypes.data)),
            *(c_void_p(start.ctypes.data), c_void_p(num_new.ctypes.data), c_void_p(hidden.data_ptr())),
        )

    def guess(
        self, sampler: NativeSampler, rows: Int32Array, positions: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Compute D rows up to their last tokens, guess the next tokens, and write them after the last ones.

        Args:
            sampler: of the model's rows.
            rows: int32[D]; all arrays are contiguous.
            positions: int32[D], of each row's last token.
            most: int32[D], tokens to guess, at least one.

        Returns:
            int32[D], the numbers of guesses: as in `most`, or 0 if the hidden state before the row's last token is not
            kept; and the guesses of all rows.
        """
        counts = np.empty_like(most)
        tokens = np.empty(int(most.sum()), dtype=np.int32)
        step = self._rows
        step.num_rows, step.num_samples, step.taps, step.paths, step.path_stride = rows.shape[0], 0, None, None, 0
        step.rows = rows.ctypes.data
        self._functions.penstock_guess(
            *(ctypes.byref(self._chain), ctypes.byref(sampler.struct), ctypes.byref(step)),
            *(c_void_p(each.ctypes.data) for each in (positions, most, counts, tokens)),
        )
        return counts, tokens[: counts.sum()]
