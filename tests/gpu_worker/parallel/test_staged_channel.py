"""What a stage receives, and for how long it waits."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from penstock.gpu_worker.staged_channel import StagedChannel
from penstock.ipc.messages import Heartbeat, Message, StepPlan, Welcome
from penstock.parts.grammars.messages import DropGrammar


class Stage:
    """Of which some steps are due."""

    def __init__(self, inbox: zmq.Socket[bytes]) -> None:
        self.inbox = inbox
        self.due: set[int] = set()
        self.num_taken = 0
        self.epochs: list[int] = []

    def is_due(self, plan: StepPlan) -> bool:
        return plan.step_id in self.due

    def take(self) -> None:
        self.num_taken += 1

    def begin(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Queued:
    """A channel with these messages."""

    num_dropped = 0

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.messages: list[Message] = []

    def receive(self, timeout_ms: int) -> Message | None:
        assert timeout_ms == 0
        return self.messages.pop(0) if self.messages else None

    def connect_again(self) -> None:
        """There is one connection."""


@pytest.fixture
def parts() -> Iterator[tuple[StagedChannel, Stage, Queued]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as inbox, context.socket(zmq.PULL) as socket:
        stage: Any = Stage(inbox)
        queued: Any = Queued(socket)
        yield StagedChannel(queued, stage), stage, queued


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, b"", b"", b"", b"")


def test_a_short_wait_sleeps(parts: tuple[StagedChannel, Stage, Queued]) -> None:
    """While the device computes, the loop asks for a message every millisecond: it must not spin meanwhile."""
    channel = parts[0]
    began, num_asked = time.monotonic(), 0
    while time.monotonic() - began < 0.1:
        assert channel.receive(1) is None
        num_asked += 1
    assert num_asked <= 100
    seconds = []
    for _ in range(20):
        began = time.monotonic()
        assert channel.receive(0) is None
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.001


def test_what_follows_a_plan_waits_with_it(parts: tuple[StagedChannel, Stage, Queued]) -> None:
    channel, stage, queued = parts
    queued.messages = [plan(1), DropGrammar(3), Heartbeat()]
    assert channel.receive(0) == Heartbeat()
    assert channel.receive(0) is None
    stage.due = {1}
    assert [channel.receive(0) for _ in range(3)] == [plan(1), DropGrammar(3), None]


def test_a_welcome_ends_what_waits(parts: tuple[StagedChannel, Stage, Queued]) -> None:
    channel, stage, queued = parts
    queued.messages = [plan(1), Welcome(1, 7), plan(2)]
    assert channel.receive(0) == Welcome(1, 7)
    assert stage.epochs == [7]
    stage.due = {1, 2}
    assert [channel.receive(0), channel.receive(0)] == [plan(2), None]
    queued.messages = [plan(3)]
    assert channel.receive(0) is None
    channel.connect_again()
    stage.due = {3}
    assert channel.receive(0) is None
