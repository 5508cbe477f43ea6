"""The socket to the scheduler for a stage of a pipeline: it holds each plan back until the plan is due."""

import math
from collections import deque
from time import monotonic

import zmq

from penstock.gpu_worker.steps.stage_runner import StageRunner
from penstock.ipc.channel import SyncDealer
from penstock.ipc.messages import Heartbeat, Message, Refused, SayHello, StepPlan, ToWorker, Welcome


class StagedChannel:
    """See `Channel` of the worker's loop. Messages that arrive after a plan that is not due wait with it."""

    def __init__(self, channel: SyncDealer[ToWorker], stage: StageRunner) -> None:
        self._channel = channel
        self._stage = stage
        self._held: deque[ToWorker] = deque()
        self._watch()

    @property
    def num_dropped(self) -> int:
        return self._channel.num_dropped

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def receive(self, timeout_ms: int | None = None) -> ToWorker | None:
        ends_at = None if timeout_ms is None else monotonic() + timeout_ms / 1000
        while True:
            while (message := self._channel.receive(0)) is not None:
                match message:
                    case Welcome():
                        self._held.clear()  # from an earlier scheduler
                        self._stage.begin(message.epoch)
                        return message
                    case SayHello() | Refused():
                        self._held.clear()
                        return message
                    case Heartbeat():
                        return message
                self._held.append(message)
            if self._held:
                first = self._held[0]
                if not isinstance(first, StepPlan) or self._stage.is_due(first):
                    return self._held.popleft()
            left = None if ends_at is None else math.ceil(1000 * (ends_at - monotonic()))
            if left is not None and left <= 0:
                return None
            self._poller.poll(left)
            self._stage.take()  # even without a plan to wait for: polling does not wait while the inbox is readable

    def connect_again(self) -> None:
        self._channel.connect_again()
        self._held.clear()
        self._watch()

    def _watch(self) -> None:
        self._poller = zmq.Poller()
        self._poller.register(self._channel.socket, zmq.POLLIN)
        self._poller.register(self._stage.inbox, zmq.POLLIN)  # what it brings may make a plan due
