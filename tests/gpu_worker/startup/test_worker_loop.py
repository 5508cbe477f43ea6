"""The loop's order of things, with a device that is slower than the host."""

import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import structlog
from torch import Tensor

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.gpu_worker.steps.model_runner import ModelRunner
from penstock.gpu_worker.worker_loop import _LOOK_MS, EXIT_REFUSED, WorkerLoop
from penstock.ipc.messages import (
    Heartbeat,
    Message,
    PixelRef,
    PixelTensor,
    Refused,
    SayHello,
    StepPlan,
    StepResult,
    Welcome,
    WorkerFailed,
    WorkerHello,
)
from penstock.models.files.folder import HuggingFaceFolder
from penstock.parts.grammars.messages import GrammarPrepared, PrepareGrammar
from penstock.parts.grammars.worker.masks import Grammars
from penstock.parts.images.messages import EncodeImage, ImageEncoded
from penstock.parts.images.worker.rows import Images
from penstock.parts.images.worker.store import EmbeddingStore
from penstock.parts.images.worker.turns import Turns

HELLO = WorkerHello(1, "w", 0, "f", "cpu", "float32", 10, 20, 4, 5, 2, 8)
END = Refused("the test is over")


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, b"", b"", b"", b"")


class SlowDevice:
    """A runner whose steps are done only once somebody waits for them; it notes what happens when."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self.grammars = Grammars(HuggingFaceFolder(Path("nowhere")), 10, CpuDevice(1))
        self._error = error

    def launch(self, plan: StepPlan) -> PendingStep:
        self.events.append(f"launch {plan.step_id}")
        if self._error is not None:
            raise self._error
        now = CpuDevice(1).mark()
        slow = _Slow(self.events, plan.step_id)
        return PendingStep(plan.step_id, slow, (), began=now, ended=now, ended_before=None)

    def clear_rows(self) -> None:
        self.events.append("clear")


class _Slow:
    def __init__(self, events: list[str], step_id: int) -> None:
        self._events, self._step_id, self._num_looks = events, step_id, 0

    def is_ready(self) -> bool:
        self._num_looks += 1
        return self._num_looks > 3

    def wait(self) -> bytes:
        self._events.append(f"wait {self._step_id}")
        return b""


class Scripted:
    """A channel that gives what is queued; None in the script is a time without messages."""

    def __init__(self, *script: Message | None) -> None:
        self._script = deque(script)
        self.sent: list[Message] = []
        self.num_dropped = 3
        self.num_connections = 1

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, timeout_ms: int | None = None) -> Any:
        assert timeout_ms is not None
        if timeout_ms == _LOOK_MS:
            time.sleep(timeout_ms / 1000)
        return self._script.popleft()

    def connect_again(self) -> None:
        self.num_connections += 1


def run(device: SlowDevice, channel: Scripted) -> int:
    parts = [device.grammars]
    return WorkerLoop(cast(ModelRunner, device), channel, HELLO, 100, max_silence_ms=300, parts=parts).run()


def test_a_queued_plan_is_launched_before_an_older_result_is_awaited() -> None:
    device, channel = SlowDevice(), Scripted(plan(0), plan(1), *[None] * 8, END)
    assert run(device, channel) == EXIT_REFUSED
    assert device.events == ["launch 0", "launch 1", "wait 0", "wait 1"]
    assert [m.step_id for m in channel.sent if isinstance(m, StepResult)] == [0, 1]
    assert channel.sent[0] == HELLO


def test_idle_welcome_and_hello() -> None:
    device, channel = SlowDevice(), Scripted(None, Heartbeat(), plan(0), Welcome(1), SayHello(), END)
    assert run(device, channel) == EXIT_REFUSED
    assert channel.sent == [HELLO, Heartbeat(3), Heartbeat(3), HELLO]  # the result was for a scheduler that is gone
    assert device.events == ["launch 0", "clear"]


def test_grammars_are_answered_beside_the_steps() -> None:
    device, channel = SlowDevice(), Scripted(PrepareGrammar(1, "x"), *[None] * 2000, plan(0), *[None] * 8, END)
    with structlog.testing.capture_logs():
        assert run(device, channel) == EXIT_REFUSED
    [answer] = [message for message in channel.sent if isinstance(message, GrammarPrepared)]
    assert "cannot be used with this model's tokenizer" in answer.error
    assert [m.step_id for m in channel.sent if isinstance(m, StepResult)] == [0]


class QuickDevice(SlowDevice):
    """Its steps are done once they are launched, in 2 ms."""

    def launch(self, plan: StepPlan) -> Any:
        time.sleep(0.002)
        self.events.append("step")
        return SimpleNamespace(
            step_id=plan.step_id, is_ready=lambda: True, result=lambda: StepResult(plan.step_id, b"", 2000)
        )


def loop_with_images(device: SlowDevice, channel: Scripted, pictures: Any) -> WorkerLoop:
    parts = [Images(EmbeddingStore(pictures), CpuDevice(1), turns=False)]
    return WorkerLoop(cast(ModelRunner, device), channel, HELLO, heartbeat_ms=100, parts=parts)


class Pictures:
    """A tower that takes at least 5 ms for each of so many parts of a picture; it notes when they began and ended."""

    def __init__(self, events: list[str], num_parts: int) -> None:
        self.parts: list[tuple[float, float]] = []
        self.vision = SimpleNamespace(num_embeddings=lambda grid: 1, pixel_shape=lambda grid: (1,))
        self._events, self._num_parts = events, num_parts

    def encode(self, pixels: Tensor, grid: tuple[int, ...]) -> Iterator[Tensor | None]:
        for i in range(self._num_parts):
            began = time.perf_counter()
            time.sleep(0.005)
            self.parts.append((began, time.perf_counter()))
            self._events.append("image")
            yield None if i + 1 < self._num_parts else pixels


def test_images_leave_steps_two_thirds_of_the_time_and_take_all_when_there_are_none() -> None:
    device = QuickDevice()
    pixels = PixelRef("", 4, (PixelTensor("pixel_values", "float32", (1,), 0),), bytes(4))
    picture = EncodeImage(1, bytes(32), (1, 1), 1, pixels)
    channel = Scripted(picture, None, *(plan(i) for i in range(40)), *[None] * 300, END)
    pictures: Any = Pictures(device.events, 12)
    loop_with_images(device, channel, pictures).run()
    assert [message.embedding_id for message in channel.sent if isinstance(message, ImageEncoded)] == [1]
    before, *between, after = " ".join(device.events).split("step")
    assert before.split() == ["image"] * 2
    assert "image image" not in " ".join(between)
    beside = sum("image" in turn for turn in between)
    assert beside >= 1
    for (began, ended), (goes_on, _) in pairwise(pictures.parts[2 : 2 + beside]):
        assert goes_on - ended >= 2 * (ended - began)
    assert after.split() == ["image"] * (12 - 2 - beside)


def test_a_turn_is_shorter_than_half_a_step() -> None:
    turns = Turns()
    assert turns.length == 0.001
    for seconds in (*[0.025] * 20, 0.4, 0.3):  # with two long prompts
        turns.stepped(seconds)
    assert turns.length == pytest.approx(0.01)
    for _ in range(20):
        turns.stepped(0.0005)
    assert turns.length == 0.001


def test_an_image_never_comes_on_top_of_a_step_with_a_prompt_but_does_not_wait_for_ever() -> None:
    device, decode = QuickDevice(), plan(1)
    prompt = StepPlan(0, bytes(8), bytes(8), np.array([1, 40], dtype=np.int32).tobytes(), b"\1\1")
    guesses = np.array([2, 3], dtype=np.int32)
    guessing = msgspec.structs.replace(prompt, num_new=(1 + guesses).tobytes(), num_drafts=guesses.tobytes())
    pixels = PixelRef("", 4, (PixelTensor("pixel_values", "float32", (1,), 0),), bytes(4))
    pictures: Any = Pictures(device.events, 1)
    for others, expected in (
        ([prompt, prompt, decode], "step step image step"),
        ([prompt, guessing], "step image step"),
        ([prompt] * 6, "step step step step image step step"),
    ):
        device.events.clear()
        channel = Scripted(EncodeImage(1, bytes(32), (1, 1), 1, pixels), *others, END)
        loop_with_images(device, channel, pictures).run()
        assert " ".join(device.events) == expected


def test_a_silent_scheduler_is_told_hello_again_over_a_new_connection() -> None:
    channel = Scripted(Welcome(1), None, None, Heartbeat(), None, None, None, Welcome(1), END)
    device = SlowDevice()
    assert run(device, channel) == EXIT_REFUSED
    assert channel.sent == [HELLO, *[Heartbeat(3)] * 5, HELLO, Heartbeat(3)]
    assert channel.num_connections == 2
    assert device.events == ["clear", "clear"]


def test_a_device_that_computes_for_long_is_no_silence() -> None:
    channel = Scripted(plan(0), *[None] * 3, Heartbeat(), END)
    assert run(SlowDevice(), channel) == EXIT_REFUSED
    assert channel.num_connections == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("broken\nmore"), "RuntimeError: broken"),
        (MemoryError(), "--max-num-batched-tokens"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate"), "--cpu-kv-cache-gib"),
    ],
)
def test_failures(error: Exception, reason: str) -> None:
    channel = Scripted(plan(7))
    with structlog.testing.capture_logs() as logs:
        assert run(SlowDevice(error), channel) == 1
    failed = channel.sent[-1]
    assert isinstance(failed, WorkerFailed)
    assert failed.step_id == 7
    assert reason in failed.reason
    assert len(logs) == 1


class TimedDevice(SlowDevice):
    """A GPU beside the host, on a clock that only the channel moves: each step takes the time that the script says."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.now = 0.0
        self.ends = 0.0  # of all that was launched
        self.late: list[float] = []  # how long after its end each result was taken
        self._seconds = deque(seconds)

    def launch(self, plan: StepPlan) -> Any:
        seconds = self._seconds.popleft()
        self.ends = max(self.now, self.ends) + seconds
        return _Timed(self, plan.step_id, seconds)


class _Timed:
    def __init__(self, device: TimedDevice, step_id: int, seconds: float) -> None:
        self.step_id = step_id
        self._device, self._seconds, self._ends = device, seconds, device.ends

    def is_ready(self) -> bool:
        return self._device.now >= self._ends

    def result(self) -> StepResult:
        self._device.late.append(self._device.now - self._ends)
        return StepResult(self.step_id, b"", num_forward_us=int(self._seconds * 1e6))


class TimedChannel(Scripted):
    """Plans come one ahead of the results; whoever waits lets time pass, and so does whoever only looks, a little."""

    def __init__(self, device: TimedDevice, num_plans: int) -> None:
        super().__init__()
        self._device, self._plans = device, deque(plan(i) for i in range(num_plans))
        self._num_taken = self.num_looks = self.num_waits = 0

    def receive(self, timeout_ms: int | None = None) -> Any:
        num_done = len(self._device.late)
        if self._plans and self._num_taken - num_done < 2:
            self._num_taken += 1
            return self._plans.popleft()
        if not self._plans and self._num_taken == num_done:
            return END
        self.num_waits += timeout_ms == 1
        self.num_looks += timeout_ms == 0
        self._device.now += 0.001 if timeout_ms else 0.000_01
        return None


def run_timed(monkeypatch: pytest.MonkeyPatch, *seconds: float, rank: int = 0) -> tuple[TimedDevice, TimedChannel]:
    device = TimedDevice(*seconds)
    channel = TimedChannel(device, len(seconds))
    monkeypatch.setattr("penstock.gpu_worker.worker_loop.monotonic", lambda: device.now)
    hello = msgspec.structs.replace(HELLO, rank=rank, num_ranks=2, answers=rank == 0)
    assert WorkerLoop(cast(ModelRunner, device), channel, hello, heartbeat_ms=100).run() == EXIT_REFUSED
    return device, channel


def test_the_loop_waits_while_a_long_step_runs_and_is_there_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    device, channel = run_timed(monkeypatch, *[0.010] * 50)
    assert max(device.late) < 0.000_02
    assert channel.num_waits >= 49 * 8
    assert channel.num_looks <= 1000 + 49 * 200, (
        "the first step, of which nothing is known, and two milliseconds of each"
    )


def test_the_loop_spins_while_steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    device, channel = run_timed(monkeypatch, *[0.0015] * 50)
    assert channel.num_waits == 0
    assert max(device.late) < 0.000_02


def test_a_step_that_is_shorter_than_those_before_is_noticed_within_a_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, _ = run_timed(monkeypatch, *[0.050] * 20, *[0.0033] * 5, *[0.050] * 5, *[0.0033] * 5)
    assert max(device.late) <= 0.001
    assert max(device.late[21:]) < 0.000_02, "and then it is one of the recent ones"


def test_a_rank_that_does_not_answer_for_its_group_sends_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, num_results in ((0, 5), (1, 0)):
        device, channel = run_timed(monkeypatch, *[0.001] * 5, rank=rank)
        assert len(device.late) == 5
        assert sum(isinstance(message, StepResult) for message in channel.sent) == num_results
