"""The decoder on the native CPU kernels: the same interface, but all layers in one call."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Int32Array, IntArray
from penstock.gpu_worker.models.decoder import DecoderWeights
from penstock.gpu_worker.models.model import ForwardInputs, ImageInputs, LayerCounter, WholeStep
from penstock.gpu_worker.models.native_program import ProgramWriter
from penstock.gpu_worker.models.rope import Rope
from penstock.gpu_worker.models.vocabulary import vocabulary_part
from penstock.gpu_worker.parallel.alone import ALONE
from penstock.gpu_worker.parallel.one_host import program_ranks
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.native.library import Library
from penstock.kernels.native.pool import NativePool
from penstock.kernels.native.program.program import GroupPages, Program, RotaryTable
from penstock.models.description.decoder import Decoder

if TYPE_CHECKING:
    from penstock.gpu_worker.models.vision.tower import Tower


class NativeDecoderModel:
    """See `Model`. Weights are in the kernels' layout. Activations are fp32, whatever the weights are.

    The inputs of each product may be rounded to bf16 or int8: see `rounds_inputs`.

    A token's hidden state is bitwise the same alone, in any batch, in any chunk of its prompt, and after preemption.
    """

    can_be_captured = False
    kernels = "native"
    is_batch_invariant = True

    def __init__(
        self,
        config: Decoder,
        weights: DecoderWeights,
        library: Library,
        *,
        ranks: Ranks = ALONE,
        rounds_inputs: bool = False,
    ) -> None:
        """Packs the weights, layer by layer.

        Args:
            config: of the model; `native_program.lacking` must find nothing in it.
            weights: fp32 or bf16.
            library: the kernels.
            ranks: the ranks that hold the model together; `weights` are this rank's part.
            rounds_inputs: as in `Library.pack` and `Library.pack_quantized`, for all weights.
        """
        self.config = config
        self._library = library
        self._part = vocabulary_part(config, ranks) if config.has_head else None
        self._writer = writer = ProgramWriter(
            config, library, program_ranks(ranks, library), rounds_inputs=rounds_inputs
        )
        self._program, self.embedding = writer.write(weights)
        self.held_experts = weights.held_experts
        self.tapped: Tensor | None = None
        self._tapped_width = 0
        self.tower: Tower | None = None
        self._deepened: Program | None = None  # for steps with pictures that add to layers
        self._pool: tuple[KVPool, NativePool] | None = None
        self._ropes = {rope: Rope(rope) for rope in writer.ropes}

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        for rope in self._ropes.values():
            rope.prepare(device, num_rows, max_model_len)

    def count_layers(self, counter: LayerCounter) -> None:
        """See `CountsLayers`."""
        self._library.count_layers(counter)

    def tap(self, layers: Sequence[int]) -> None:
        """See `HandsOutLayers`."""
        self._program, self._tapped_width = self._writer.tapped(layers)
        self._deepened = None

    @property
    def enters_rows(self) -> bool:
        return any(rope.table is None for rope in self._ropes.values())

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        for rope in self._ropes.values():
            if rope.table is None:
                rope.set_row(row, num_prompt_tokens)

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """fp32[T, H]."""
        program, added = self._program, None
        if inputs.images is not None and inputs.images.places is not None:
            if (deep := inputs.images.deep(self.config.hidden_size)) is not None:
                program, added = self._deepening(inputs, *deep)
            inputs = self._with_embeddings(inputs, inputs.images)
        if self._tapped_width:
            self.tapped = torch.empty(inputs.input_ids.shape[0], self._tapped_width)
        return program.forward(
            *(inputs.input_ids, inputs.positions, inputs.query_start_loc, inputs.seq_lens),
            [GroupPages(each.slot_mapping, each.page_table) for each in map(inputs.of_group, range(len(kv.groups)))],
            [self._rotary(rope, inputs) for rope in self._ropes.values()],
            self._pool_of(kv),
            self._given(inputs),
            self.tapped,
            inputs.paths,
            inputs.rows,
            added,
            None if inputs.images is None else inputs.images.last_seen,
            last_seen_in_windows=inputs.images is not None and inputs.images.only_in_windows,
        )

    @property
    def output(self) -> Program | None:
        """The program with the output matrix, if this rank has all of the matrix."""
        return self._program if self._part is None and self.config.has_head else None

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """fp32[N, H], rows of the output matrix, for int64[N]."""
        assert self._writer.head is not None
        return self._library.rows(self._writer.head, token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32[S, H] -> fp32[S, V]"""
        logits = self._program.logits(hidden)
        return logits if self._part is None else self._part.gathered(logits)

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        tables = [rope.table for rope in self._ropes.values() if rope.table is not None]
        if len(tables) < len(self._ropes):
            return None
        step = self._program.step(token_ids, page_tables, tables, self._pool_of(kv))
        if (part := self._part) is None:
            return WholeStep(step.compute, sys.maxsize, step)

        def compute(
            rows: Int32Array,
            start: Int32Array,
            num_new: Int32Array,
            samples: IntArray,
            given: Tensor | None = None,
            hidden: Tensor | None = None,
            taps: Tensor | None = None,
            paths: Int32Array | None = None,
        ) -> Tensor:
            logits = step.compute(rows, start, num_new, samples, given, hidden, taps, paths)
            return part.gathered(logits) if len(samples) else logits.new_empty(0, part.vocab_size)

        return WholeStep(compute, sys.maxsize)

    def _with_embeddings(self, inputs: ForwardInputs, images: ImageInputs) -> ForwardInputs:
        """Put embeddings in place of tokens. One rank alone does so, because the ranks' embeddings are added up."""
        assert images.places is not None
        assert images.embeddings is not None
        given = torch.zeros(len(inputs.input_ids), self.config.hidden_size)
        if self.config.shard is None or self.config.shard.place.tensor == 0:
            given[images.places] = images.embeddings[:, : self.config.hidden_size].float()
        return inputs._replace(input_ids=inputs.input_ids.index_fill(0, images.places, -1), given=given)

    def _deepening(self, inputs: ForwardInputs, places: Tensor, deep: Tensor) -> tuple[Program, Tensor]:
        """The program that adds to the first layers' outputs, and what it adds to each token: fp32[T, layers * H]."""
        if self._deepened is None:
            self._deepened = self._writer.deepened(deep.shape[1])
        added = torch.zeros(len(inputs.input_ids), deep.shape[1] * deep.shape[2])
        added[places] = deep.flatten(1).float()
        return self._deepened, added

    def _given(self, inputs: ForwardInputs) -> Tensor | None:
        if inputs.images is not None:
            return inputs.given
        if self.config.entry is None and (self.config.shard is None or self.config.shard.place.is_first_stage):
            return None
        return torch.zeros(len(inputs.input_ids), self.config.hidden_size) if inputs.given is None else inputs.given

    def _rotary(self, rope: Rope, inputs: ForwardInputs) -> RotaryTable:
        turns = None if inputs.images is None else inputs.images.turns
        if rope.table is not None and turns is None:
            return RotaryTable(rope.table, is_by_position=True)
        rotation = rope.for_step(inputs.positions, inputs.rows, inputs.query_start_loc, turns)
        return RotaryTable(rotation.cos_sin, is_by_position=False)

    def _pool_of(self, kv: KVPool) -> NativePool:
        if self._pool is None or self._pool[0] is not kv:
            states = [] if kv.states is None else [its for layer in kv.states.layers.values() for its in layer]
            self._pool = kv, NativePool(kv.layers, [group.page_size for group in kv.groups], states)
        return self._pool[1]
