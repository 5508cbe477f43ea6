"""The decoder on the native CPU kernels: the same interface, all layers in one call."""

import sys
from collections.abc import Sequence

from torch import Tensor

from penstock.core.checkpoint.decoder import Decoder
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.decoder import DecoderModel, DecoderWeights
from penstock.gpu_worker.models.model import ForwardInputs, WholeStep
from penstock.gpu_worker.models.native_program import ProgramWriter
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.native.library import Library
from penstock.kernels.native.program import GroupPages, NativePool, RotaryTable

_LONG = 128
"""Tokens in a step from which torch's bf16 products are worth unpacking all weights for, on processors with bf16 matrix
instructions. Estimated from such processors' rates: none was available."""


class NativeDecoderModel:
    """See `Model`. Weights in the kernels' layout; activations are fp32, whatever the weights are.

    Activations may be rounded to bf16 as inputs of each product: see `rounds_inputs`.

    A token's hidden state is bitwise the same alone, in any batch, in any chunk of its prompt, and after preemption.
    """

    kernels = "native"
    can_be_captured = False

    def __init__(
        self,
        config: Decoder,
        weights: DecoderWeights,
        library: Library,
        *,
        rounds_inputs: bool = False,
        long_on_torch: bool = False,
    ) -> None:
        """Packs the weights, layer by layer.

        Args:
            config: of the model; `native_program.lacking` finds nothing in it.
            weights: fp32 or bf16.
            library: the kernels.
            rounds_inputs: as in `Library.pack`, for all weights.
            long_on_torch: whether torch computes steps of many tokens, which changes their bits. It gets one weight at
                a time, unpacked; weights must be bf16.
        """
        self.config = config
        writer = ProgramWriter(config, library, rounds_inputs=rounds_inputs)
        self._program, unpacking = writer.write(weights)
        self._pool: tuple[KVPool, NativePool] | None = None
        self._ropes = {rope: Rope(rope) for rope in writer.ropes}
        self._torch: DecoderModel | None = None
        if long_on_torch:
            self._torch = DecoderModel(config, unpacking)
            self._torch.ropes = self._ropes

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        for rope in self._ropes.values():
            rope.prepare(device, num_rows, max_model_len)

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        for rope in self._ropes.values():
            if rope.table is None:
                rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """fp32[T, H]."""
        if self._torch is not None and inputs.input_ids.shape[0] >= _LONG:
            return self._torch.forward(inputs, kv).float()
        return self._program.forward(
            *(inputs.input_ids, inputs.positions, inputs.query_start_loc, inputs.seq_lens),
            [GroupPages(each.slot_mapping, each.page_table) for each in map(inputs.of_group, range(len(kv.groups)))],
            [self._rotary(rope, inputs) for rope in self._ropes.values()],
            self._pool_of(kv),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] -> fp32[S, V]"""
        return self._program.logits(hidden)

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        tables = [rope.table for rope in self._ropes.values() if rope.table is not None]
        if len(tables) < len(self._ropes):
            return None
        step = self._program.step(token_ids, page_tables, tables, self._pool_of(kv))
        return WholeStep(step.compute, max_tokens=sys.maxsize if self._torch is None else _LONG - 1)

    def _rotary(self, rope: Rope, inputs: ForwardInputs) -> RotaryTable:
        if rope.table is not None:
            return RotaryTable(rope.table, is_by_position=True)
        rotation = rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc)
        return RotaryTable(rotation.cos_sin, is_by_position=False)

    def _pool_of(self, kv: KVPool) -> NativePool:
        if self._pool is None or self._pool[0] is not kv:
            self._pool = kv, NativePool(kv.layers)
        return self._pool[1]
