"""The interface of models, which the runner drives, and their inputs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.gpu_worker.devices.device import Device, Int32Array, IntArray
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.kernels.experts.held_experts import HeldExperts
from penstock.kernels.native.program.program import ProgramStep
from penstock.models.description.decoder import Decoder
from penstock.models.description.model_config import ModelConfig

if TYPE_CHECKING:
    from penstock.gpu_worker.models.vision.tower import Tower


LayerCounter = npt.NDArray[np.int64]
"""int64[1]: how many layers of the current step have written their keys and values."""


class GroupInputs(NamedTuple):
    """Where a step's tokens are in the pages of one group."""

    slot_mapping: Tensor  # int64[T]
    page_table: Tensor  # int32[N, max_pages]; entries for positions before a group's window are arbitrary pages


class WholeImage(NamedTuple):
    """The tokens of a picture whose positions all see each other."""

    row: int  # index in the batch
    first_token: int  # index among the step's tokens
    begin: int  # position of the first token
    end: int  # position after the picture; all of the picture is in the step or was computed before


class ImageInputs(NamedTuple):
    """The pictures in a step's rows, if some have any."""

    places: Tensor | None  # int64[E], indices of the tokens that embeddings replace; None: no tokens
    embeddings: Tensor | None  # [E, H], or wider, with H more numbers for each of the first layers
    turns: Tensor | None  # int64[3, T], time, row and column of each token, if positions have these three parts
    wholes: tuple[WholeImage, ...] = ()  # the pictures whose positions see each other
    last_seen: Tensor | None = None  # int32[T], the last position that each token sees; None: each token's own
    only_in_windows: bool = False  # whether pictures see ahead only in layers with a window

    def last_seen_within(self, window: int | None) -> Tensor | None:
        """int32[T], `last_seen` in layers with this window."""
        return None if window is None and self.only_in_windows else self.last_seen

    def deep(self, size: int) -> tuple[Tensor, Tensor] | None:
        """int64[E] and [E, layers, H], to be added after the first layers; None if embeddings have only H = `size`."""
        if self.places is None or self.embeddings is None or self.embeddings.shape[1] == size:
            return None
        return self.places, self.embeddings[:, size:].unflatten(1, (-1, size))


class ForwardInputs(NamedTuple):
    """One step's ragged batch (T tokens, N rows)."""

    input_ids: Tensor  # int32[T]
    positions: Tensor  # int64[T]
    rows: Tensor  # int32[N], the row of each batch row in the row state
    slot_mapping: Tensor  # int64[T], in the first page group
    query_start_loc: Tensor  # int32[N + 1]
    seq_lens: Tensor  # int32[N]
    page_table: Tensor  # int32[N, max_pages], of the first page group
    max_query_len: int
    max_seq_len: int
    others: tuple[GroupInputs, ...] = ()  # for the page groups after the first
    given: Tensor | None = None  # [T, H], replaces the embeddings, or goes with them (`Entry`); it is overwritten
    paths: Tensor | None = None  # int32[N, 1 + D], as in `paged_attention`, if some rows are nodes of trees
    images: ImageInputs | None = None
    host_lens: tuple[IntArray, IntArray] | None = None
    """Each row's new tokens and its length with them, on the host; None in captured graphs, which serve any lengths."""

    def of_group(self, number: int) -> "ForwardInputs":
        """The same inputs with the slots and the page table of another group."""
        return self if number == 0 else self._replace(**self.others[number - 1]._asdict())


class Compute(Protocol):
    """See `WholeStep`."""

    def __call__(
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
            start: int32[N], their first positions.
            num_new: int32[N], how many positions each computes.
            samples: int64[S], which of the N sample.
            given: the output of the stage before; for a head that guesses tokens, the hidden state of each position.
            hidden: fp32[T, H], filled with the final hidden states of all positions; only if they are wanted and
                nothing is given.
            taps: fp32[T, n * H], filled with the inputs of layers: see `HandsOutLayers`.
            paths: int32[N, 1 + D], contiguous, as in `paged_attention`. A token's id is at its place, too.

        Returns:
            Logits, fp32[S, V]; from a stage without a head, hidden states, fp32[T, H].
        """


class WholeStep(NamedTuple):
    """A step in a single call, from rows to logits."""

    compute: Compute
    max_tokens: int
    """Steps with more tokens go through `Model.forward`."""
    program: ProgramStep | None = None
    """The native CPU kernels' step, if it computes the whole model."""


def has_logits(config: ModelConfig) -> bool:
    """Whether a model has logits: all have but the stages of a pipeline before the last one."""
    return not isinstance(config, Decoder) or config.has_head


NO_EXPERTS: Mapping[int, HeldExperts] = {}


class Model(Protocol):
    """A family's model, made by the function `build(config, reader)` that the family's registration names."""

    @property
    def config(self) -> ModelConfig:
        """The parsed config.json."""

    @property
    def kernels(self) -> str:
        """The kernels that compute it, as one word for the log."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's bits are the same alone, in any batch, in any chunk of its prompt, and when recomputed."""

    @property
    def held_experts(self) -> Mapping[int, HeldExperts]:
        """The experts of each layer that spreads its experts over ranks, by the layer's number in the checkpoint."""

    @property
    def can_be_captured(self) -> bool:
        """Whether `forward` may run inside a captured CUDA graph."""

    def prepare(self, device: Device, num_rows: int, max_model_len: int) -> None:
        """Allocate what depends on the number of rows or the longest sequence; call this before the first step."""

    @property
    def enters_rows(self) -> bool:
        """Whether `enter_row` does anything, because rotations depend on prompt lengths; known after `prepare`."""

    def enter_row(self, row: int, num_prompt_tokens: int) -> None:
        """A sequence enters a row."""

    def forward(self, inputs: ForwardInputs, kv: KVPool) -> Tensor:
        """Compute a batch.

        Args:
            inputs: the batch.
            kv: the pool; keys and values are written to it, and earlier ones read.

        Returns:
            [T, H], the final hidden states after the norm, as `logits` takes them; from a stage without a head, the
            input of the next stage.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] of the rows that sample -> [S, V]. The result's device and dtype decide how tokens are sampled."""

    def whole_step(self, token_ids: Tensor, page_tables: Sequence[Tensor], kv: KVPool) -> WholeStep | None:
        """Return a faster path from these tables to logits, if the model has one.

        Args:
            token_ids: int32[R, L], known and sampled ids by position.
            page_tables: int32[R, max_pages] of each page group.
            kv: as in `forward`.
        """


@runtime_checkable
class CountsLayers(Protocol):
    """A model that reports the progress of a step, on devices where launched work is done at once."""

    def count_layers(self, counter: LayerCounter) -> None:
        """Keep this counter up to date from now on; its reader sets it to 0 before each step."""


@runtime_checkable
class SeesImages(Protocol):
    """A model that can have a vision tower; then its `forward` takes `ForwardInputs.images`."""

    tower: "Tower | None"


@runtime_checkable
class Classifies(Protocol):
    """A model with a head of its own for classes, if its configuration has some."""

    def classify(self, pooled: Tensor) -> Tensor:
        """fp32[S, H], pooled hidden states -> [S, classes], logits."""


@runtime_checkable
class HandsOutLayers(Protocol):
    """A model that hands out the inputs of some of its layers."""

    tapped: Tensor | None
    """[T, n * H], of the last `forward`."""

    def tap(self, layers: Sequence[int]) -> None:
        """Hand out the residual stream at the input of these n layers from now on; the layer count stands for its end.

        Called at most once, before the first step.
        """
