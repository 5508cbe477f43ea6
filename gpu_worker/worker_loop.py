"""The worker's loop: receive plans, launch them, and send their results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec.structs import replace

from penstock.gpu_worker.devices.out_of_memory import failure_reason, is_out_of_memory
from penstock.gpu_worker.part import WorkerPart
from penstock.ipc import process
from penstock.ipc.logs import num_dropped_log_lines
from penstock.ipc.messages import (
    Heartbeat,
    Message,
    ProfileSteps,
    Refused,
    SayHello,
    StepPlan,
    StepResult,
    ToWorker,
    Welcome,
    WorkerFailed,
    WorkerHello,
)
from penstock.ipc.overrides import calls, overriding

if TYPE_CHECKING:
    from penstock.gpu_worker.profiler import StepProfiler

log = structlog.get_logger()

EXIT_FAILED, EXIT_REFUSED = 1, process.EXIT_CONFIG
_NUM_RECENT = 16
_SAFE_SECONDS = 0.002
"""While a GPU computes, the loop polls it every millisecond (the poller's shortest wait), as long as the shortest
recent step leaves at least this much time. Then it spins between socket and device. On a CPU a step is done once it is
launched, so the loop neither waits nor spins."""

_LOOK_MS = 2
"""How long to wait when there is nothing to do but a part is busy, in a thread of its own or with work that is left."""


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

    def launch(self, plan: StepPlan) -> PendingResult:
        """Begin a step."""

    def clear_rows(self) -> None:
        """Forget all sequences."""


class WorkerLoop:
    """Serves one scheduler. The rank that answers sends results.

    A plan that is already queued is launched before the loop waits for the result of an older one. So the device goes
    from step to step without waiting for the host.

    A scheduler sends heartbeats. If it has sent nothing for `max_silence_ms` while this loop only listened, it may not
    have received the hello. Then the worker says hello again over a new connection.
    """

    def __init__(
        self,
        runner: Runner,
        channel: Channel,
        hello: WorkerHello,
        heartbeat_ms: int,
        *,
        max_silence_ms: int = 10_000,
        profiler: "StepProfiler | None" = None,
        memory_use: Callable[[], tuple[int, int]] = lambda: (0, 0),
        parts: Sequence[WorkerPart] = (),
    ) -> None:
        """`memory_use` returns the device's used and total bytes; `parts`: what is done beside the steps."""
        self._runner = runner
        self._channel = channel
        self._hello = hello
        self._heartbeat_ms = heartbeat_ms
        self._max_silence_ms = max_silence_ms
        self._profiler = profiler
        self._memory_use = memory_use
        self._orders = {kind: part.order for part in parts for kind in part.orders}
        overridden = partial(calls, WorkerPart, parts)
        self._begins, self._begins_step = overridden("begin"), overridden("begin_step")
        self._ends_step, self._takes_done = overridden("end_step"), overridden("take_done")
        self._busy, self._due = (overriding(WorkerPart, parts, name) for name in ("is_busy", "is_due"))
        self._pending: deque[PendingResult] = deque()
        self._recent_us: deque[int] = deque(maxlen=_NUM_RECENT)  # durations of recent steps
        self._began = self._beat_at = monotonic()  # the running step; the last heartbeat
        self._has_heard, self._silence_ms = False, 0

    def run(self) -> int:
        """Serve until the scheduler refuses or a step fails; return the exit code."""
        self._channel.send(self._hello)
        message: ToWorker | None = None
        while True:
            try:
                self._send_results()
                for take_done in self._takes_done:
                    self._send_all(take_done())
                idle_ms = self._idle_ms()
                message = self._channel.receive(self._poll_ms() if self._pending and idle_ms else idle_ms)
                for part in self._due:
                    if part.is_due and (answer := part.work(message)) is not None:
                        self._channel.send(answer)
                if message is not None:
                    self._has_heard, self._silence_ms = True, 0
                    exit_code = self._obey(message)
                    if exit_code is not None:
                        return exit_code
                elif not self._pending:
                    self._beat_or_reconnect(idle_ms)
            except Exception as error:
                return self._failed(error, message)

    def _send_results(self) -> None:
        pending = self._pending
        while pending and pending[0].is_ready():
            result = pending.popleft().result()
            self._began = monotonic()  # the start of the next step, if there is one
            self._recent_us.append(result.num_forward_us)
            for end_step in self._ends_step:
                end_step(result)
            if self._hello.answers:
                self._channel.send(result)

    def _send_all(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._channel.send(message)

    def _idle_ms(self) -> int:
        """How long to wait for a message while no step runs."""
        if any(part.is_due for part in self._due):
            return 0
        return _LOOK_MS if any(part.is_busy for part in self._busy) else self._heartbeat_ms

    def _poll_ms(self) -> int:
        """How long to wait for a message before checking on the running step again."""
        if self._recent_us and self._began + min(self._recent_us) / 1e6 - monotonic() >= _SAFE_SECONDS:
            return 1
        return 0

    def _obey(self, message: ToWorker) -> int | None:
        """Do what the scheduler asks for; return an exit code if the worker must end."""
        match message:
            case StepPlan():
                self._launch(message)
            case ProfileSteps() if self._profiler is not None:
                self._profiler.record(message.num_steps)
            case Welcome():
                self._begin()
            case SayHello(is_broken=True) if self._hello.num_ranks > 1:
                log.warning("rank lost, restarting")
                return EXIT_FAILED
            case SayHello():
                self._pending.clear()
                self._channel.send(self._hello)
            case Refused():
                log.error("refused by the scheduler", reason=message.reason)
                return EXIT_REFUSED
            case _ if (order := self._orders.get(type(message))) is not None:
                order(message)
            case _:
                pass
        return None

    def _launch(self, plan: StepPlan) -> None:
        if not self._pending:
            self._began = monotonic()
        for begin_step in self._begins_step:
            begin_step(plan.step_id)
        self._pending.append(self._runner.launch(plan))
        if self._profiler is not None:
            self._profiler.step()

    def _begin(self) -> None:
        """A scheduler has accepted the hello: forget everything of an earlier one."""
        if self._hello.num_ranks > 1:
            self._hello = replace(self._hello, was_welcomed=True)
        self._pending.clear()
        for begin in self._begins:
            begin()
        self._runner.clear_rows()
        self._beat()

    def _beat(self) -> None:
        self._channel.send(Heartbeat(self._channel.num_dropped, num_dropped_log_lines(), *self._memory_use()))

    def _beat_or_reconnect(self, waited_ms: int) -> None:
        """Nothing has come, and no step runs."""
        self._silence_ms += waited_ms
        if self._silence_ms >= self._max_silence_ms:
            if self._has_heard:
                log.warning("scheduler silent, reconnecting", seconds=self._silence_ms / 1000)
            self._has_heard, self._silence_ms = False, 0
            self._channel.connect_again()
            self._channel.send(self._hello)
        elif waited_ms == self._heartbeat_ms or monotonic() - self._beat_at > self._heartbeat_ms / 1000:
            self._beat()
            self._beat_at = monotonic()

    def _failed(self, error: Exception, message: ToWorker | None) -> int:
        """Tell the scheduler that a step has failed; return the exit code."""
        step_id = self._pending[0].step_id if self._pending else -1
        if isinstance(message, StepPlan):
            step_id = message.step_id
        reason = failure_reason(error)
        log.error("worker failed", step_id=step_id, reason=reason, exc_info=not is_out_of_memory(error))
        self._channel.send(WorkerFailed(step_id, reason, is_out_of_memory(error)))
        return EXIT_FAILED
