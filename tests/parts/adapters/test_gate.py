"""Any mixture of requests, loads, unloads and deaths: all end, and no row has an adapter that the worker has not."""

import random
from collections import deque
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.scheduler import ScheduledStep
from penstock.parts.adapters.messages import AdapterPrepared, DropAdapter, LoadAdapter, PrepareAdapter
from penstock.parts.adapters.scheduler import AdapterGate
from tests.core.driver import Driver, make_limits, make_request
from tests.faults.soak import sized


class Adapted(Driver):
    """With a worker that also reads adapters, one at a time, and refuses those that say so."""

    def __init__(self, max_loras: int, **options: Any) -> None:
        super().__init__(**options)
        self.max_loras = max_loras
        self.to_read: deque[PrepareAdapter] = deque()
        self.here: dict[int, bool] = {}  # those that were asked for, and not dropped: whether they are ready
        self.gate._max_live = max_loras

    @property
    def gate(self) -> AdapterGate:
        gate = self.scheduler.parts.get(AdapterGate)
        assert gate is not None
        return gate

    def take_orders(self) -> None:
        messages = self.scheduler.take_messages(before_plan=True)
        for message in messages:
            if isinstance(message, PrepareAdapter):
                self.to_read.append(message)
                self.here[message.adapter_id] = False
            elif isinstance(message, DropAdapter):
                del self.here[message.adapter_id]
        assert len(self.here) <= self.max_loras
        self.worker.take_orders(messages)

    def schedule(self) -> ScheduledStep | None:
        step = super().schedule()
        for new in () if step is None else step.plan.new_rows:
            assert not new.adapter_id or self.here[new.adapter_id]
        for seq in self.scheduler.running:
            assert bool(seq.request.adapter_id) == bool(seq.request.adapter)
            assert not seq.request.adapter_id or self.here[seq.request.adapter_id]
        return step

    def prepare(self) -> bool:
        if not self.to_read:
            return super().prepare()
        message = self.to_read.popleft()
        is_bad = message.key.startswith("bad")
        if message.adapter_id in self.here:
            self.here[message.adapter_id] = not is_bad
        answer = AdapterPrepared(message.adapter_id, "it is bad" if is_bad else "", 0 if is_bad else 4)
        self.take(self.scheduler.answered(answer))
        return True

    def reset_worker(self, limits: Any = None, *, has_died: bool = True) -> None:
        self.to_read.clear()
        self.here.clear()
        super().reset_worker(limits, has_died=has_died)

    def beat(self) -> None:
        """What an engine does several times a second."""
        self.take(self.scheduler.expire_queued(self.now))
        if self.gate.may_forget:
            self.gate.forget({request.adapter for request in self.scheduler.requests.values()})


@pytest.mark.parametrize("seed", range(sized(12, 2000)))
def test_all_end(seed: int) -> None:
    rng = random.Random(seed)
    limits = make_limits(max_num_seqs=rng.choice([1, 3, 6]), num_pages=rng.choice([40, 90]))
    policy = rng.choice(["fcfs", "priority", "sjf"])
    driver = Adapted(
        rng.choice([1, 2, 4]), limits=limits, scheduling_policy=policy, pipeline_depth=rng.choice([0, 1, 2])
    )
    keys = [f"{name}@1" for name in ("a", "b", "c", "d", "bad")]
    for key in keys:
        driver.gate.load(LoadAdapter(key, key))
    paused = set[str]()
    for number in range(300):
        event, live = rng.random(), [*driver.scheduler.requests]
        if event < 0.25:
            request = make_request(
                f"r{number}", range(rng.randrange(1, 12)), rng.choice([1, 4, 12]), n=rng.choice([1, 1, 3]),
                priority=rng.randrange(3), is_background=rng.random() < 0.25, tenant=rng.choice("xy"),
                grammar=rng.choice(["", "", "", "g1", "g2", "bad"]),
            )  # fmt: skip
            driver.add(replace(request, adapter=rng.choice(["", "", *keys])))
        elif event < 0.29 and live:
            driver.abort(rng.choice(live))
        elif event < 0.33 and live:
            paused.add(its := rng.choice(live))
            driver.scheduler.pause(its)
        elif event < 0.37 and paused:
            paused.remove(its := rng.choice(sorted(paused)))
            driver.scheduler.resume(its)
        elif event < 0.38:
            driver.reset_worker(has_died=rng.random() < 0.7)
        elif event < 0.41:
            driver.gate.unload(rng.choice(keys), abort=rng.random() < 0.5)
        elif event < 0.45:
            driver.gate.load(LoadAdapter(key := rng.choice(keys), key))
        elif event < 0.55:
            driver.beat()
        elif event < 0.7:
            driver.prepare()
        else:
            for act in rng.sample((driver.schedule, driver.execute, driver.process), 3):
                if act == driver.schedule or (driver.plans if act == driver.execute else driver.results):
                    act()
    for its in paused:
        driver.scheduler.resume(its)
    for _ in range(20_000):
        driver.beat()
        if not driver.scheduler.has_work and not driver.plans and not driver.results:
            break
        driver.step()
    else:
        raise AssertionError(f"{len(driver.scheduler.requests)} requests wait for ever")
