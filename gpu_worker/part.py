"""What a worker does beside its steps: prepare grammars, make embeddings, move pages to a disk or another engine.

A part overrides the methods that it needs, and only those are ever called: the worker's loop asks once, at the start,
who overrides what. So a part that is not there costs nothing, and the loop knows none by name. What takes part in the
steps themselves is a `RowPart` (`steps/row_part.py`).
"""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from penstock.config import Config
from penstock.config.ranks import Rank
from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.adapters import Adapters
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.host_pages import HostPages
from penstock.gpu_worker.state.kv_pool import KVPool
from penstock.ipc.messages import Message, StepResult, ToWorker, WorkerHello
from penstock.models.files.source import Checkpoint


class Context(NamedTuple):
    """A worker that could take plans by now: what its parts may use."""

    config: Config  # with the sizes that the options left to the device
    rank: Rank
    hello: WorkerHello  # without what parts add
    checkpoint: Checkpoint
    model: Model
    device: Device
    kv: KVPool
    host_pages: HostPages | None  # for the parts that want or need some
    adapters: Adapters  # what rows can add to the model's products


class WorkerPart:
    """All methods are called in the worker's main thread, and none of them may wait once plans come."""

    orders: ClassVar[tuple[type[Message], ...]] = ()
    """The kinds of messages from the scheduler that are this part's."""

    # --- at the start, in this order ----------------------------------------------------------

    @classmethod
    def device_bytes(cls, config: Config, model: Model) -> int:
        """How much of a GPU's memory the pool must leave to this part."""
        return 0

    @classmethod
    def host_bytes(cls, config: Config) -> int:
        """How much of the host's memory it wants for pages."""
        return 0

    @classmethod
    def needs_host_pages(cls, config: Config) -> bool:
        """Whether pages pass through the host's memory, so that it must have room for some without a host tier, too."""
        return False

    @classmethod
    def needs_shared_pages(cls, config: Config) -> bool:
        """Whether other processes read pages, so that they must be in memory that can be shared."""
        return False

    @classmethod
    def of(cls, context: Context) -> "WorkerPart | None":
        """The part as this worker has it; None if it has no use for it.

        Raises:
            ConfigError: if what the configuration asks for cannot be had.
        """
        raise NotImplementedError

    def hello(self, hello: WorkerHello) -> WorkerHello:
        """Return the hello with what the scheduler must know of this part. The steps of the warm-up are done."""
        return hello

    # --- while it serves ----------------------------------------------------------------------

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
        """The worker ends, or its start has failed: release what outlives it. Nothing else is called afterwards."""
