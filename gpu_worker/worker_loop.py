"""The worker's loop: receive plans, launch them, and send their results in order."""

from collections import deque
from collections.abc import Callable, Collection
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec.structs import replace

from penstock.gpu_worker.devices.out_of_memory import failure_reason, is_out_of_memory
from penstock.gpu_worker.disk.mover import DiskMover
from penstock.gpu_worker.grammars.store import GrammarStore
from penstock.gpu_worker.handover.handover import Handover
from penstock.ipc import process
from penstock.ipc.logs import num_dropped_log_lines
from penstock.ipc.messages import (
    DropEmbedding,
    DropGrammar,
    DropStoredKV,
    EncodeImage,
    ExpertTokens,
    Heartbeat,
    LoadKV,
    Message,
    OfferKV,
    PrepareGrammar,
    ReceiveKV,
    Refused,
    SayHello,
    StepPlan,
    StepResult,
    StopReceivingKV,
    StoreKV,
    ToWorker,
    Welcome,
    WithdrawKV,
    WorkerFailed,
    WorkerHello,
)

if TYPE_CHECKING:
    from penstock.gpu_worker.images.store import EmbeddingStore

log = structlog.get_logger()

EXIT_FAILED, EXIT_REFUSED = 1, process.EXIT_CONFIG
_NUM_RECENT = 16
_SAFE_SECONDS = 0.002
"""While a GPU computes, the loop polls it every millisecond (the poller's shortest wait), as long as the shortest
recent step leaves at least this much time. Then it spins between socket and device. On a CPU a step is done once it is
launched, so the loop neither waits nor spins."""

_TELL_SECONDS = 2.0
"""Between two messages with the experts' token counts. Reading the counts waits for the device."""

_LOOK_MS = 2
"""How long to wait when there is nothing to do but a thread prepares a grammar or moves pages, or a tower has parts
left."""


class Channel(Protocol):
    """The worker's side of the socket to the scheduler."""

    @property
    def num_dropped(self) -> int:
        """Number of messages received that were invalid."""

    def send(self, message: Message) -> None:
        """Queue a message."""

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        """The next message, or None if none came in time."""

    def connect_again(self) -> None:
        """Replace the connection by a new one; what is queued in the old one is lost."""


class PendingResult(Protocol):
    """A launched step."""

    @property
    def step_id(self) -> int:
        """The step id of its plan."""

    def is_ready(self) -> bool:
        """Whether `result` would return immediately."""

    def result(self) -> StepResult:
        """Return its result; blocks until the device has computed it."""


class Runner(Protocol):
    """Executes plans (`ModelRunner`)."""

    @property
    def grammar_store(self) -> GrammarStore:
        """Where grammars are prepared."""

    def launch(self, plan: StepPlan) -> PendingResult:
        """Begin a step."""

    def clear_rows(self) -> None:
        """Forget all sequences."""


def run_worker(
    runner: Runner,
    channel: Channel,
    hello: WorkerHello,
    heartbeat_ms: int,
    on_step: Callable[[], None] | None = None,
    *,
    max_silence_ms: int = 10_000,
    memory_use: Callable[[], tuple[int, int]] = lambda: (0, 0),
    disk: DiskMover | None = None,
    handover: Handover | None = None,
    take_expert_tokens: Callable[[], ExpertTokens | None] | None = None,
    images: "EmbeddingStore | None" = None,
) -> int:
    """Serve one scheduler until it refuses or a step fails; return the exit code. The rank that answers sends results.

    A plan that is already queued is launched before the loop waits for the result of an older one. So the device goes
    from step to step without waiting for the host. `on_step` is called after each launch. `memory_use` returns the
    device's used and total bytes. If there is a disk tier, `disk` moves pages while steps run. If the engine has a
    role, `handover` moves pages between engines. If experts are spread over ranks, `take_expert_tokens` returns what
    this rank's experts have computed since the last call.

    `images` makes embeddings of images between steps, if the model takes images.

    A scheduler sends heartbeats. If it has sent nothing for `max_silence_ms` while this loop only listened, it may not
    have received the hello. Then the worker says hello again over a new connection.
    """
    pending: deque[PendingResult] = deque()
    grammars = runner.grammar_store
    recent_us: deque[int] = deque(maxlen=_NUM_RECENT)  # durations of recent steps
    beat_at = told_at = began = monotonic()
    has_heard, silence_ms = False, 0
    channel.send(hello)
    while True:
        try:
            while pending and pending[0].is_ready():
                result = pending.popleft().result()
                began = monotonic()  # the start of the next step, if there is one
                recent_us.append(result.num_forward_us)
                if images is not None:
                    images.stepped(result.num_forward_us / 1e6)
                if handover is not None:
                    handover.end_step(result.step_id)
                if hello.answers:
                    channel.send(result)
            if take_expert_tokens is not None and monotonic() - told_at > _TELL_SECONDS:
                told_at = monotonic()
                if (tokens := take_expert_tokens()) is not None:
                    channel.send(tokens)
            if grammars.is_preparing:
                for prepared in grammars.take_prepared():
                    channel.send(prepared)
            is_encoding = images is not None and images.is_busy
            is_moving = disk is not None and disk.is_busy
            if is_moving and disk is not None:
                for moved in disk.take_done():
                    channel.send(moved)
            if handover is not None and handover.is_busy:
                is_moving = True
                for received in handover.take_done():
                    channel.send(received)
            idle_ms = _LOOK_MS if grammars.is_preparing or is_moving or is_encoding else heartbeat_ms
            idle_ms = 0 if images is not None and images.is_due else idle_ms
            message = channel.receive(_look_ms(recent_us, began) if pending and idle_ms else idle_ms)
            if message is not None:
                has_heard, silence_ms = True, 0
            if images is not None and images.is_due:
                is_behind = isinstance(message, StepPlan) and images.yields_to(message)
                if not is_behind and (encoded := images.work()) is not None:
                    channel.send(encoded)
            match message:
                case StepPlan():
                    if not pending:
                        began = monotonic()
                    if handover is not None:
                        handover.begin_step(message.step_id)
                    pending.append(runner.launch(message))
                    if on_step is not None:
                        on_step()
                case None if not pending:
                    silence_ms += idle_ms
                    if silence_ms >= max_silence_ms:
                        if has_heard:
                            log.warning("scheduler silent, reconnecting", seconds=silence_ms / 1000)
                        has_heard, silence_ms = False, 0
                        channel.connect_again()
                        channel.send(hello)
                    elif idle_ms == heartbeat_ms or monotonic() - beat_at > heartbeat_ms / 1000:
                        channel.send(Heartbeat(channel.num_dropped, num_dropped_log_lines(), *memory_use()))
                        beat_at = monotonic()
                case PrepareGrammar():
                    grammars.prepare(message)
                case DropGrammar():
                    grammars.drop(message.grammar_id)
                case EncodeImage() | DropEmbedding() if images is not None:
                    images.order(message)
                case StoreKV() | LoadKV() | DropStoredKV() if disk is not None:
                    disk.order(message)
                case OfferKV() | WithdrawKV() | ReceiveKV() | StopReceivingKV() if handover is not None:
                    handover.order(message)
                case Welcome():
                    if hello.num_ranks > 1:
                        hello = replace(hello, was_welcomed=True)
                    pending.clear()  # from an earlier scheduler
                    if handover is not None:
                        handover.begin()
                    runner.clear_rows()
                    if disk is not None:
                        disk.begin()
                    channel.send(Heartbeat(channel.num_dropped, num_dropped_log_lines(), *memory_use()))
                case SayHello(is_broken=True) if hello.num_ranks > 1:
                    log.warning("the group has lost a rank: starting again, to meet the new one")
                    return EXIT_FAILED
                case SayHello():
                    pending.clear()
                    channel.send(hello)
                case Refused():
                    log.error("refused by the scheduler", reason=message.reason)
                    return EXIT_REFUSED
                case _:
                    pass
        except Exception as error:
            step_id = message.step_id if isinstance(message, StepPlan) else (pending[0].step_id if pending else -1)
            reason = failure_reason(error)
            log.error("worker failed", step_id=step_id, reason=reason, exc_info=not is_out_of_memory(error))
            channel.send(WorkerFailed(step_id, reason, is_out_of_memory(error)))
            return EXIT_FAILED


def _look_ms(recent_us: Collection[int], began: float) -> int:
    """Return how long to wait on the socket before checking the device again; its step began at `began`."""
    if recent_us and began + min(recent_us) / 1e6 - monotonic() >= _SAFE_SECONDS:
        return 1
    return 0
