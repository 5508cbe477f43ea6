"""What takes part in the steps of some rows: grammars mask logits, images replace embeddings, vectors replace tokens.

    enter           rows come and go                     in plans with new or freed rows
    ─────────────────────────────────────────────────    only while the part has rows:
    begins          a batch is about to be computed
    inputs          what the forward pass gets
    begin_draws     ─▶ the forward pass is launched      the last moment to work beside it
    computed        ◀─ its hidden states
    mask            logits, before tokens are drawn
    shape           logits, once nothing more is forbidden
    sends           what goes to the host with them
    drawn           the tokens, as they arrive

The runner asks who overrides what when rows come and go, never in a step. So a part without rows costs nothing.
"""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as ListOf
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from penstock.gpu_worker.devices.device import Download, Int32Array, IntArray
from penstock.gpu_worker.models.model import ImageInputs
from penstock.gpu_worker.part import WorkerPart
from penstock.gpu_worker.steps.host_step import HostBatch, Put
from penstock.gpu_worker.steps.made_up_plans import Limits
from penstock.ipc.messages import RowError, StepPlan
from penstock.ipc.overrides import calls


class Sent(NamedTuple):
    """What a part returns of a step beside tokens."""

    put: Put
    values: Tensor | None = None  # int32[n], which goes to the host with the tokens


class RowPart(WorkerPart):
    """N rows of a step, S of which return something, and T tokens."""

    draws: ClassVar[bool] = True
    """Whether tokens are drawn for its rows; otherwise no logits are computed for them."""

    can_extend: bool = False
    """Whether it can judge and extend guesses for its rows; if it cannot, but overrides `extend`, none are made."""

    rows: Collection[int] = ()
    """The rows for which it does something now."""

    can_be_captured: ClassVar[bool] = True
    """Whether what it does for a step's rows is done in the graphs of all steps, too."""

    def recording(self) -> AbstractContextManager[None] | None:
        """If steps with its rows are to have graphs of their own: in this context, it does its part of any step."""
        return None

    def warm_up(self, limits: Limits) -> Iterable[StepPlan]:
        """Plans that compile what steps with such rows launch. All is cleared afterwards."""
        return ()

    def enter(self, plan: StepPlan) -> None:
        """Rows are freed, and then new ones come. Called before the plan's batch is computed."""

    def begins(self, batch: HostBatch) -> None:
        """A batch is about to be computed."""

    def inputs(self, batch: HostBatch) -> ImageInputs | None:
        """What replaces the embeddings and positions of some of the step's tokens."""
        return None

    def begin_draws(self, rows: Int32Array, guesses: IntArray | None) -> None:
        """The forward pass is about to be launched, and draws follow.

        Args:
            rows: int32[S], the rows that sample, each once or, with drafts, once for each token that it may return.
            guesses: int[S], the guess that follows each; negative after a row's last one.
        """

    def computed(self, batch: HostBatch, hidden: Tensor) -> None:
        """The final hidden states of all tokens, [T, H]; they may be overwritten later."""

    def mask(self, logits: Tensor) -> tuple[RowError, ...]:
        """Change logits [S, V] in place; return the rows that have no possible token."""
        return ()

    def shape(self, logits: Tensor, rows: Int32Array, positions: IntArray, token_ids: Tensor) -> tuple[RowError, ...]:
        """Change logits [S, V] in place, after all masks; return the rows for which that fails.

        Args:
            logits: any float type.
            rows: int32[S].
            positions: int[S], where the tokens drawn from the logits will be.
            token_ids: int32[R, L], all rows' tokens by position; those before `positions` are known.
        """
        return ()

    def sends(self) -> Sent | None:
        """What this step returns beside tokens. Called once tokens are drawn."""
        return None

    def drawn(self, download: Download) -> None:
        """The step's tokens are on their way: this download begins with them, int32[S]."""

    def expect_guesses(self) -> None:
        """Tokens are guessed ahead from now on."""

    def extend(self, rows: IntArray, guesses: ListOf[ListOf[int]], most: IntArray) -> list[list[int]]:
        """Cut guesses for rows' next tokens where these cannot come, and append those that must come next.

        Args:
            rows: int[D], of this part. All tokens of launched steps are known.
            guesses: the guesses for each row.
            most: int[D], the most tokens to return for each row.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all rows, and all that was made for rows."""


class RowCalls(NamedTuple):
    """Who does something in a step: methods of the parts that have rows now."""

    begins: ListOf[Callable[[HostBatch], None]] = ()
    inputs: ListOf[Callable[[HostBatch], ImageInputs | None]] = ()
    begin_draws: ListOf[Callable[[Int32Array, IntArray | None], None]] = ()
    computed: ListOf[Callable[[HostBatch, Tensor], None]] = ()
    mask: ListOf[Callable[[Tensor], tuple[RowError, ...]]] = ()
    shape: ListOf[Callable[[Tensor, Int32Array, IntArray, Tensor], tuple[RowError, ...]]] = ()
    sends: ListOf[Callable[[], Sent | None]] = ()
    drawn: ListOf[Callable[[Download], None]] = ()
    undrawn: ListOf[RowPart] = ()  # parts for whose rows no tokens are drawn

    @classmethod
    def of(cls, parts: ListOf[RowPart]) -> "RowCalls":
        """`parts`: those with rows."""
        methods: dict[str, Any] = {name: calls(RowPart, parts, name) for name in cls._fields[:-1]}
        undrawn = [part for part in parts if not part.draws]
        return cls(**methods, undrawn=undrawn)
