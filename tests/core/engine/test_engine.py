"""The scheduler's process and a worker that is slow, or hangs: judged by its results, over real sockets."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq
from msgspec.structs import replace
from structlog.testing import capture_logs

from penstock.config import Config, IpcOptions
from penstock.config.parts import with_parts
from penstock.core.__main__ import run
from penstock.core.engine.loop import STATS_INTERVAL, Engine
from penstock.core.launch.probe import main as probe
from penstock.ipc.channel import Dealer
from penstock.ipc.codec import Codec, deltas_of, pack_int32
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    EngineNotReady,
    EngineReady,
    EngineStats,
    FrontendHello,
    Heartbeat,
    Message,
    PauseRequest,
    RowError,
    SayHello,
    SequenceDelta,
    StepPlan,
    StepResult,
    ToFrontend,
    TokenBatch,
    ToWorker,
    Welcome,
    WorkerFailed,
    WorkerHello,
)
from penstock.ipc.parent import Parent
from penstock.ipc.process import EXIT_CONFIG
from penstock.parts.grammars.messages import PrepareGrammar
from tests.core.driver import make_config, make_request
from tests.parts.images.test_image_gate import image, shows

PID = 4321


class Peers:
    """A frontend and a worker, which answers a plan only when the test says so."""

    def __init__(self, folder: Path, config: Config | None = None, **of_worker: object) -> None:
        """`of_worker`: fields of its hello."""
        self._of_worker = of_worker
        options = IpcOptions(
            frontend_address=f"ipc://{folder}/f", worker_address=f"ipc://{folder}/w", max_heartbeat_interval=0.05
        )
        self.hung: list[int] = []
        self.engine = Engine(replace(config or Config(), ipc=options), self.hung.append)
        self._watch = asyncio.create_task(self.engine.watch())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.to_frontend: asyncio.Queue[ToFrontend] = asyncio.Queue()
        self.to_worker: asyncio.Queue[ToWorker] = asyncio.Queue()
        self.frontend: Dealer[ToFrontend] = Dealer(
            self._context,
            options.frontend_address,
            "f",
            Codec(with_parts(ToFrontend, "TO_FRONTEND")),
            self.to_frontend.put_nowait,
        )
        self.worker: Dealer[ToWorker] = self.new_worker()
        self.frontend.send(FrontendHello(PROTOCOL_VERSION, "f", "m"))

    def new_worker(self) -> Dealer[ToWorker]:
        address = self.engine.workers.channel.address
        self.worker = Dealer(
            self._context, address, "w", Codec(with_parts(ToWorker, "TO_WORKER")), self.to_worker.put_nowait
        )
        hello = WorkerHello(PROTOCOL_VERSION, "w", 0, "m", "cpu", "float32", 100, 64, 4, 64, 8, 32, PID)
        self.worker.send(replace(hello, **self._of_worker))
        return self.worker

    async def plan(self) -> StepPlan:
        while not isinstance(message := await asyncio.wait_for(self.to_worker.get(), 5), StepPlan):
            pass
        return message

    async def welcome(self) -> None:
        while not isinstance(await asyncio.wait_for(self.to_worker.get(), 5), Welcome):
            pass

    async def ready(self) -> None:
        while not isinstance(await asyncio.wait_for(self.to_frontend.get(), 5), EngineReady):
            pass

    async def not_ready(self) -> None:
        while not isinstance(await asyncio.wait_for(self.to_frontend.get(), 5), EngineNotReady):
            pass

    async def delta(self) -> SequenceDelta:
        while not isinstance(message := await asyncio.wait_for(self.to_frontend.get(), 5), TokenBatch):
            pass
        return next(deltas_of(message))

    def close(self) -> None:
        self._watch.cancel()
        self.frontend.close()
        self.worker.close()
        self._context.term()
        self.engine.close()


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[Peers]:
    peers = Peers(tmp_path)
    await peers.ready()
    yield peers
    peers.close()


async def test_a_step_without_a_result_ends_the_worker(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives and answers pings; its device does not."""
    monkeypatch.setattr("penstock.core.engine.worker_group.STEP_SECONDS", 0.3)
    monkeypatch.setattr("penstock.core.engine.worker_group.STEP_SECONDS_PER_TOKEN", 0.0)
    peers.frontend.send(make_request("a", [1, 2, 3], 2))
    first = await peers.plan()
    async with asyncio.timeout(60):
        while not peers.hung:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.02)
    assert peers.hung == [PID]
    monkeypatch.undo()
    peers.worker.send(StepResult(first.step_id, pack_int32([9])))  # too late: it is not known any more
    peers.worker.close()
    peers.new_worker()
    await peers.welcome()
    again = await peers.plan()
    assert again.new_rows == first.new_rows
    peers.worker.send(StepResult(again.step_id, pack_int32([7])))
    assert (await peers.delta()).token_ids == (7,)


async def test_a_trial_that_cannot_begin_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspected image waits for a grammar that hangs. Meanwhile no step is planned, so nothing else tells of it."""
    monkeypatch.setattr("penstock.core.engine.worker_group.STEP_SECONDS", 0.3)
    peers = Peers(tmp_path, max_embedding_bytes=1000, embedding_bytes=10)
    await peers.ready()
    peers.frontend.send(make_request("a", [1, 2, 3], 2, grammar="hangs"))
    while not isinstance(await asyncio.wait_for(peers.to_worker.get(), 5), PrepareGrammar):
        pass
    await asyncio.sleep(0.5)
    assert not peers.hung, "steps can still be planned"
    peers.frontend.send(replace(shows("b", [1, 2, 3], image("suspected", 0, 2)), num_deaths=1))
    async with asyncio.timeout(60):
        while not peers.hung:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.02)
    assert peers.hung == [PID]
    peers.close()


async def test_a_batch_begins_in_time_although_nothing_happens(tmp_path: Path) -> None:
    peers = Peers(tmp_path, make_config(batching="dynamic", max_num_seqs=2, batch_wait_ms=600))
    await peers.ready()
    [owner] = peers.engine.frontends._heard
    peers.engine.changed = lambda: None  # type: ignore[method-assign]  # heartbeats do not plan: only the timer does
    for names in ("a", "bc"):  # one that waits for its time; one that is full before it
        peers.engine._pump()
        began = asyncio.get_running_loop().time()
        for name in names:
            request = make_request(name, [1, 2, 3], 1)
            assert peers.engine.scheduler is not None
            assert peers.engine.scheduler.add_request(request, owner, monotonic()) is None
            peers.engine._pump()
        plan = await peers.plan()
        waited = asyncio.get_running_loop().time() - began
        assert len(plan.new_rows) == len(names)
        assert (waited >= 0.6) == (names == "a")
        peers.worker.send(StepResult(plan.step_id, pack_int32([9] * len(names))))
        await peers.delta()
    peers.close()


async def test_a_long_step_may_be_long(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound grows with the tokens of the step, and counts from the result before it."""
    monkeypatch.setattr("penstock.core.engine.worker_group.STEP_SECONDS", 0.3)
    monkeypatch.setattr("penstock.core.engine.worker_group.STEP_SECONDS_PER_TOKEN", 1.0)
    await asyncio.sleep(0.5)  # idle: nothing is due
    peers.frontend.send(make_request("a", range(20), 2))
    step = await peers.plan()
    await asyncio.sleep(1.2)
    peers.worker.send(StepResult(step.step_id, pack_int32([7])))
    assert (await peers.delta()).token_ids == (7,)
    assert not peers.hung


async def test_logits_that_are_no_numbers_are_logged(peers: Peers) -> None:
    peers.frontend.send(make_request("a", [1, 2, 3], 2))
    step = await peers.plan()
    error = RowError(0, "the model's logits are not finite numbers", "invalid_logits")
    with capture_logs() as lines:
        peers.worker.send(StepResult(step.step_id, pack_int32([0]), row_errors=(error,)))
        delta = await peers.delta()
    assert (delta.error, delta.error_code) == (error.reason, "invalid_logits")
    [line] = [line for line in lines if line.get("reason") == error.reason]
    assert (line["log_level"], line["request_id"]) == ("error", "a")


async def test_a_result_from_before_the_last_hello_is_dropped(peers: Peers) -> None:
    peers.frontend.send(make_request("a", [1, 2, 3], 2))
    first = await peers.plan()
    peers.worker.send(WorkerHello(PROTOCOL_VERSION, "w", 0, "m", "cpu", "float32", 100, 64, 4, 64, 8, 32, PID))
    peers.worker.send(StepResult(first.step_id, pack_int32([9])))
    await peers.welcome()
    again = await peers.plan()
    peers.worker.send(StepResult(again.step_id, pack_int32([7])))
    assert (await peers.delta()).token_ids == (7,)


async def test_a_request_that_ends_two_workers_is_ended(peers: Peers) -> None:
    peers.frontend.send(make_request("a", [1, 2, 3], 1))
    plan = await peers.plan()
    peers.worker.send(WorkerFailed(plan.step_id, "illegal address"))
    await peers.not_ready()
    peers.worker.close()
    peers.new_worker()
    again = await peers.plan()
    peers.worker.send(WorkerFailed(again.step_id, "once more"))
    delta = await peers.delta()
    peers.worker.close()
    peers.new_worker()
    assert (delta.finish_reason, delta.error_code) == ("error", "ends_workers")
    peers.frontend.send(make_request("again", [1, 2, 3], 1))
    delta = await peers.delta()  # at once: no worker is asked
    assert (delta.request_id, delta.error_code) == ("again", "ends_workers")
    peers.frontend.send(make_request("b", [1, 2, 4], 1))
    plan = await peers.plan()
    peers.worker.send(StepResult(plan.step_id, pack_int32([7])))
    assert (await peers.delta()).token_ids == (7,)


def out_of_order(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id + (1 << 40), pack_int32([7]))


def too_many(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, pack_int32([7, 7]))


def no_numbers(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, b"\x07")


def no_token(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, pack_int32([100]))


def a_negative_token(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, pack_int32([-1]))


@pytest.mark.parametrize("nonsense", [out_of_order, too_many, no_numbers, no_token, a_negative_token])
async def test_a_result_that_makes_no_sense_ends_the_worker_alone(
    peers: Peers, nonsense: Callable[[StepPlan], StepResult]
) -> None:
    peers.frontend.send(make_request("a", [1, 2, 3], 2))
    peers.worker.send(nonsense(await peers.plan()))
    await peers.not_ready()
    assert peers.hung == [PID]
    peers.worker.close()
    peers.new_worker()
    await peers.welcome()
    again = await peers.plan()
    peers.worker.send(StepResult(again.step_id, pack_int32([7])))
    assert (await peers.delta()).token_ids == (7,)


async def test_who_has_not_said_hello_does_nothing_and_is_counted(peers: Peers) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine, told = peers.engine, asyncio.Queue[object]()
    stranger: Dealer[ToFrontend] = Dealer(
        context, engine.frontends.channel.address, "x", Codec(ToFrontend), told.put_nowait
    )
    other: Dealer[ToWorker] = Dealer(
        context, engine.workers.channel.address, "x", Codec(with_parts(ToWorker, "TO_WORKER")), told.put_nowait
    )
    stranger.send(make_request("x", [1, 2, 3], 2))
    other.send(StepResult(0, pack_int32([7])))
    peers.worker.send(Heartbeat(7))
    for _ in range(2):
        assert await asyncio.wait_for(told.get(), 60) == SayHello()
    assert (engine.frontends.channel.num_dropped, engine.workers.channel.num_dropped) == (1, 1)
    async with asyncio.timeout(60):
        while not isinstance(message := await peers.to_frontend.get(), EngineStats) or not (
            message.num_dropped_from_frontends and message.num_dropped_from_workers and message.num_dropped_by_worker
        ):
            pass
    assert message.num_dropped_by_worker == 7
    assert (message.num_dropped_from_frontends, message.num_dropped_from_workers) == (1, 1)
    stranger.close()
    other.close()
    context.term()


@pytest.mark.parametrize("meddle", [AbortRequest("a"), PauseRequest("a")])
async def test_a_frontend_does_not_meddle_with_the_requests_of_another(peers: Peers, meddle: Message) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers.frontend.send(make_request("a", [1, 2, 3], 2))
    plan = await peers.plan()
    told: asyncio.Queue[ToFrontend] = asyncio.Queue()
    other: Dealer[ToFrontend] = Dealer(
        context, peers.engine.frontends.channel.address, "g", Codec(ToFrontend), told.put_nowait
    )
    other.send(FrontendHello(PROTOCOL_VERSION, "g", "m"))
    other.send(meddle)
    other.send(AbortRequest("nobody", 1 << 60))  # of a request that has ended: nothing wrong with it
    other.send(Heartbeat())
    async with asyncio.timeout(60):
        while not isinstance(news := await told.get(), EngineStats) or not news.num_dropped_from_frontends:
            pass
    peers.worker.send(StepResult(plan.step_id, pack_int32([7])))
    assert (await peers.delta()).token_ids == (7,)
    peers.worker.send(StepResult((await peers.plan()).step_id, pack_int32([8])))
    assert (await peers.delta()).finish_reason == "length"
    assert peers.engine.frontends.channel.num_dropped == 1
    other.close()
    context.term()


async def test_nobody_is_told_anything_after_the_end(tmp_path: Path) -> None:
    peers = Peers(tmp_path)
    await peers.ready()
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    peers.frontend.send(make_request("a", [1, 2, 3], 2))
    await peers.plan()  # counters have changed, and frontends are told of that a little later
    peers.close()
    await asyncio.sleep(2 * STATS_INTERVAL)
    assert not errors


def test_a_scheduler_runs_in_a_thread_of_somebody_else_s_program(tmp_path: Path) -> None:
    """Signals are that program's."""
    options = IpcOptions(frontend_address=f"ipc://{tmp_path}/f", worker_address=f"ipc://{tmp_path}/w")
    handler = signal.getsignal(signal.SIGTERM)
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    codes: list[int] = []

    async def serve() -> int:
        started.append((asyncio.get_running_loop(), asyncio.Event()))
        return await run(Config(ipc=options), Parent(None), started[0][1], asyncio.Event())

    thread = threading.Thread(target=lambda: codes.append(asyncio.run(serve())))
    thread.start()
    assert probe([options.frontend_address]) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    loop, stopped = started[0]
    loop.call_soon_threadsafe(stopped.set)
    thread.join(60)
    assert codes == [0]


async def test_options_that_cannot_work_end_the_process_for_good() -> None:
    """By the code upon which nobody starts it again."""
    config = make_config(scheduling_policy="nowhere:Policy")
    with capture_logs() as logged:
        assert await run(config, Parent(None), asyncio.Event(), asyncio.Event()) == EXIT_CONFIG
    assert ["--scheduling-policy nowhere:Policy" in line["reason"] for line in logged] == [True]
