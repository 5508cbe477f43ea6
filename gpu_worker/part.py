"""What a worker does beside its steps: prepare grammars, make embeddings, move pages to a disk or another engine.

A part overrides the methods that it needs, and only those are ever called: the worker's loop asks once, at the start,
who overrides what. So a part that is not there costs nothing, and the loop knows none by name.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from penstock.ipc.messages import Message, StepResult, ToWorker


class WorkerPart:
    """All methods are called in the worker's main thread, and none of them may wait."""

    orders: ClassVar[tuple[type[Message], ...]] = ()
    """The kinds of messages from the scheduler that are this part's."""

    def order(self, message: Any) -> None:
        """Begin what the scheduler has decided; `message` is one of `orders`."""
        raise NotImplementedError

    def begin(self) -> None:
        """A scheduler has accepted this worker: forget what an earlier one has ordered."""

    def begin_step(self, step_id: int) -> None:
        """A step is about to be launched."""

    def end_step(self, result: StepResult) -> None:
        """A step has been computed."""

    def take_done(self) -> Iterable[Message]:
        """Return the answers that have become ready since the last call."""
        return ()

    @property
    def is_busy(self) -> bool:
        """Whether there will soon be answers to take, so that an idle loop has to look again."""
        return False

    @property
    def is_due(self) -> bool:
        """Whether `work` should be called now."""
        return False

    def work(self, coming: ToWorker | None) -> Message | None:
        """Use the device between two steps, for about as long as a stream does not feel; return an answer, if any.

        Args:
            coming: what the loop does next. It is for the part to let a `StepPlan` go first.
        """
        return None

    def close(self) -> None:
        """The worker ends."""
