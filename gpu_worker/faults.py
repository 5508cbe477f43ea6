"""The worker's fault points, as wrappers around its runner and its socket. Without faults neither is wrapped."""

from collections.abc import Callable, Collection

import numpy as np

from penstock.gpu_worker.worker_loop import Channel, PendingResult, Runner
from penstock.ipc import faults
from penstock.ipc.messages import Message, StepPlan, StepResult, ToWorker


def with_faults(runner: Runner, channel: Channel) -> tuple[Runner, Channel]:
    """Wrap both, if this process was started with faults."""
    if not any(fault.point.startswith("worker.") for fault in faults.ARMED):
        return runner, channel
    return _FaultyRunner(runner), _FaultyChannel(channel)


class _FaultyRunner:
    """A runner that fails at its fault points, or for rows that contain a token."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._before = faults.point("worker.step")
        self._after = faults.point("worker.computed")
        self._before_tokens: Callable[[Collection[int]], None] | None = faults.point_about("worker.step")
        self._prompts: dict[int, frozenset[int]] = {}  # by row

    def launch(self, plan: StepPlan) -> PendingResult:
        self._before()
        if self._before_tokens is not None:
            for row in np.frombuffer(plan.freed_rows, dtype=np.int32).tolist():
                self._prompts.pop(row, None)
            for new in plan.new_rows:
                known = np.frombuffer(new.token_ids, dtype=np.int32)
                self._prompts[new.row] = frozenset(known[: new.num_prompt_tokens].tolist())
            for row in np.frombuffer(plan.rows, dtype=np.int32).tolist():
                self._before_tokens(self._prompts[row])
        step = self._runner.launch(plan)
        self._after()
        return step

    def clear_rows(self) -> None:
        self._prompts.clear()
        self._runner.clear_rows()


class _FaultyChannel:
    """A channel that fails before it sends a result."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._before = faults.point("worker.result")

    @property
    def num_dropped(self) -> int:
        return self._channel.num_dropped

    def send(self, message: Message) -> None:
        if isinstance(message, StepResult):
            self._before()
        self._channel.send(message)

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        return self._channel.receive(timeout_ms)

    def connect_again(self) -> None:
        self._channel.connect_again()
