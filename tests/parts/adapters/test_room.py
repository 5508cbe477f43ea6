"""Who gets room in the worker's memory, and when: nobody waits for ever, whoever the others are."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.scheduling.invariants import check_invariants
from penstock.ipc.messages import AddRequest, SamplingParams
from penstock.parts.adapters.messages import DropAdapter, LoadAdapter, PrepareAdapter
from penstock.parts.adapters.scheduler import MOST_PASSING
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.engine_in_process import Engine
from tests.parts.adapters.test_parity import gate_of, load
from tests.parts.adapters.written import write_adapter

__all__ = ["checkpoint", "one_thread"]
Make = Callable[..., Checkpoint]
SHORT = SamplingParams(max_tokens=4, temperature=0.0)
LONG = SamplingParams(max_tokens=200, temperature=0.0)
[PROMPT] = prompts((7,), seed=2)


class Watched(Engine):
    """Notes the order in which requests end."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **{"cpu_kernels": "native", "max_loras": 1} | options)
        self.ended: list[str] = []
        self.errors: dict[str, str] = {}

    def ask(self, adapter: str, sampling: SamplingParams = SHORT, n: int = 1, **fields: Any) -> str:
        """Queue a request with further fields; its id."""
        request_id = f"q{self._num_added}"
        self._num_added += 1
        prompt = np.array(PROMPT, dtype=np.int32).tobytes()
        assert self.add_request(AddRequest(request_id, prompt, sampling, n, adapter=adapter, **fields)) is None
        return request_id

    def turn(self) -> None:
        """A step, and what an engine does several times a second."""
        now = time.monotonic()
        deltas = [delta for its in self.scheduler.expire_queued(now).values() for delta in its]
        for delta in deltas + self.step().deltas:
            if delta.finish_reason is not None:
                self.ended.append(delta.request_id)
            if delta.finish_reason == "error":
                self.errors[delta.request_id] = delta.error

    def finish(self, most: int = 3000) -> None:
        """Run until nothing is left."""
        for _ in range(most):
            if not self.has_work:
                return
            self.turn()
        raise AssertionError(f"{len(self.scheduler.requests)} requests wait for ever")


def with_adapters(checkpoint: Make, folder: Path, count: int, **options: Any) -> tuple[Watched, list[str]]:
    base, model = checkpoint("llama")
    engine, keys = Watched(base, **options), []
    for number in range(count):
        write_adapter(folder / f"{number}", model, 2, ("q_proj",), seed=number)
        keys.append(load(engine, f"a{number}", folder / f"{number}"))
    engine.make_ready()
    return engine, keys


def test_a_stream_of_one_adapter_does_not_keep_others_out(checkpoint: Make, tmp_path: Path) -> None:
    engine, (usual, other) = with_adapters(checkpoint, tmp_path, 2, max_num_seqs=4)
    for _ in range(4):
        engine.ask(usual)
    late = engine.ask(other)
    for _ in range(4 * MOST_PASSING):
        engine.ask(usual)
    engine.finish()
    assert engine.ended.index(late) <= 4 + MOST_PASSING + 1
    assert not engine.errors


def test_neither_does_it_keep_a_new_one_from_being_read(checkpoint: Make, tmp_path: Path) -> None:
    """Whoever loads it waits for an answer."""
    engine, (usual,) = with_adapters(checkpoint, tmp_path, 1, max_num_seqs=4)
    for number in range(4 * MOST_PASSING):
        engine.ask(usual, SamplingParams(max_tokens=3 + number % 4, temperature=0.0))  # so they never end together
    engine.turn()
    write_adapter(tmp_path / "new", checkpoint("llama")[1], 2)
    new = load(engine, "new", tmp_path / "new")
    while gate_of(engine).known[new].state == "loading":
        engine.turn()
    assert len(engine.ended) <= MOST_PASSING + 8
    engine.finish()


@pytest.mark.parametrize("has_row", [True, False])
def test_work_in_the_background_gives_way(checkpoint: Make, tmp_path: Path, has_row: bool) -> None:
    """Be it in a row, or waiting because others have some; and it comes back."""
    engine, (behind, before) = with_adapters(checkpoint, tmp_path, 2)
    background = engine.ask(behind, LONG, is_background=True)
    assert engine.scheduler.schedule(time.monotonic()) is None  # it is asked for
    others = [] if has_row else [engine.ask("", LONG)]
    for _ in range(5):
        engine.turn()
    first = engine.ask(before)
    engine.finish()
    assert engine.ended == [first, *others, background]
    assert not engine.errors


def test_a_higher_priority_goes_before(checkpoint: Make, tmp_path: Path) -> None:
    engine, (usual, other) = with_adapters(checkpoint, tmp_path, 2, scheduling_policy="priority")
    low = engine.ask(usual, LONG, priority=5)
    for _ in range(5):
        engine.turn()
    high = engine.ask(other, priority=0)
    last = engine.ask(usual, priority=9)  # its adapter is there
    engine.finish()
    assert engine.ended == [high, last, low] or engine.ended == [high, low, last]


def test_one_that_is_unloaded_while_it_is_on_trial(checkpoint: Make, tmp_path: Path) -> None:
    """The worker is not asked for it any more, and steps go on."""
    engine, (usual,) = with_adapters(checkpoint, tmp_path, 1, max_loras=2)
    gate, scheduler = gate_of(engine), engine.scheduler
    write_adapter(tmp_path / "bad", checkpoint("llama")[1], 2)
    bad = load(engine, "bad", tmp_path / "bad")
    assert [type(order) for order in scheduler.take_messages(before_plan=True)] == [PrepareAdapter]
    scheduler.reset_worker(engine.hello, has_died=True)
    assert scheduler.is_on_trial
    gate.unload(bad)
    gate.forget(set())
    assert not scheduler.is_on_trial
    assert not gate.num_in_making
    assert not [o for o in scheduler.take_messages(before_plan=True) if isinstance(o, PrepareAdapter | DropAdapter)]
    engine.ask(usual)
    engine.finish(100)


def test_one_that_is_unloaded_and_loaded_again_at_once(checkpoint: Make, tmp_path: Path) -> None:
    """Before it was read for the first time, which is still to come."""
    engine, (usual,) = with_adapters(checkpoint, tmp_path, 1)
    gate = gate_of(engine)
    engine.ask(usual)
    engine.turn()
    write_adapter(tmp_path / "late", checkpoint("llama")[1], 2)
    late = load(engine, "late", tmp_path / "late")
    gate.unload(late)
    gate.load(LoadAdapter(late, str(tmp_path / "late")))
    engine.finish()
    engine.make_ready()
    assert gate.known[late].state == "ready"


def test_requests_of_one_that_is_unloaded_at_once(checkpoint: Make, tmp_path: Path) -> None:
    """All end with the reason, also one that its client lets go on meanwhile; others go on."""
    engine, (gone, stays) = with_adapters(checkpoint, tmp_path, 2, max_loras=2)
    ends = [engine.ask(gone, LONG), engine.ask(gone, LONG, n=2)]
    other = engine.ask(stays, LONG)
    for _ in range(3):
        engine.turn()
    engine.scheduler.pause(ends[0])
    gate_of(engine).unload(gone, abort=True)
    engine.scheduler.resume(ends[0])
    engine.step()
    engine.finish()
    assert engine.errors == dict.fromkeys(ends, "the request's adapter was unloaded")
    assert other in engine.ended


@pytest.mark.parametrize("seed", range(4))
def test_nobody_waits_for_ever(checkpoint: Make, tmp_path: Path, seed: int) -> None:
    """Requests of all kinds come, pause, go on, and leave, in any order, with a worker that dies now and then."""
    rng = random.Random(seed)
    policy = rng.choice(["fcfs", "priority"])
    options = {"max_num_seqs": rng.choice([2, 5]), "num_pages": 30, "scheduling_policy": policy}
    engine, keys = with_adapters(checkpoint, tmp_path, 5, max_loras=rng.choice([1, 2, 3]), **options)
    scheduler, paused = engine.scheduler, set[str]()
    for _ in range(400):
        event, live = rng.random(), [*scheduler.requests]
        if event < 0.3:
            sampling = SamplingParams(max_tokens=rng.choice([1, 5, 40]), temperature=0.0)
            adapter, n = rng.choice(["", *keys]), rng.choice([1, 1, 3])
            fields: dict[str, Any] = {"is_background": rng.random() < 0.3}
            engine.ask(adapter, sampling, n, **fields | {"priority": rng.randrange(3)})
        elif event < 0.35 and live:
            scheduler.abort(rng.choice(live))
        elif event < 0.4 and live:
            paused.add(its := rng.choice(live))
            scheduler.pause(its)
        elif event < 0.45 and paused:
            scheduler.resume(its := rng.choice(sorted(paused)))
            paused.remove(its)
        elif event < 0.46 and not engine._pending:
            engine.runner.clear_rows()
            scheduler.reset_worker(engine.hello, has_died=False)
        engine.turn()
        check_invariants(scheduler)
    for request_id in paused:
        scheduler.resume(request_id)
    engine.finish()
    assert not engine.errors
