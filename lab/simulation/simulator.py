"""The simulator: the real scheduler in virtual time, driven as the engine's loop drives it.

    arrivals ──▶ add_request ──┐
                               ▼
    worker ◀── plan ── schedule() ◀── after each batch of messages
    worker ── result ▶ process() ──▶ schedule(), then tokens to the clients

The scheduler handles one message at a time: what arrives while it is busy waits, as in the real process. So does the
frontend with requests that clients send together.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from math import inf

from penstock.config import Config
from penstock.core.engine.loop import STATS_INTERVAL
from penstock.core.scheduling.scheduler import Scheduler
from penstock.ipc.messages import (
    AddRequest,
    ImageRef,
    PixelRef,
    SamplingParams,
    StepResult,
    TokenBatch,
    WorkerHello,
)
from penstock.lab.simulation.arrivals import NO_TARGETS, Arrival, ShownImage, Targets
from penstock.lab.simulation.device import Device, Timing, frontend_waits
from penstock.lab.simulation.outcomes import Gauge, Outcome, Run
from penstock.lab.simulation.worker import STOP, ModelledWorker
from penstock.parts.recording.scheduler.step_trace import StepTrace

_OWNER = b"clients"
_WATCH_INTERVAL = 1.0
"""Seconds between the engine's checks for requests that have waited too long."""


_WAKE_DELAY = 1e-3
"""The engine's timer fires this much later than the scheduler asked for."""


class StuckError(RuntimeError):
    """Requests are left, but no event will ever come: a policy or a batching kind holds them forever."""


def messages(
    arrivals: Sequence[Arrival], prompts: Iterable[bytes], timing: Timing, targets: Targets = NO_TARGETS
) -> list[AddRequest]:
    """Return a load's requests as the scheduler gets them. They can be reused in any number of simulations."""
    found = []
    for number, (arrival, prompt) in enumerate(zip(arrivals, prompts, strict=True)):
        max_tokens = max(arrival.max_tokens, arrival.output_len)
        stops = (STOP,) if max_tokens > arrival.output_len else ()
        own = targets.of(arrival)
        found.append(
            AddRequest(
                str(number),
                prompt,
                SamplingParams(max_tokens=max_tokens, seed=number, stop_token_ids=stops),
                priority=arrival.priority,
                tenant=arrival.key,
                weight=arrival.weight,
                ttft_left=max(1e-3, own.ttft_ms / 1e3 - timing.request) if own.ttft_ms else 0.0,
                tpot=own.tpot_ms / 1e3,
                images=tuple(map(_image, arrival.images)),
            )
        )
    return found


def _image(shown: ShownImage) -> ImageRef:
    key = blake2b(shown.name.encode(), digest_size=32).digest()
    return ImageRef(key, shown.start, shown.length, shown.num_embeddings, (), PixelRef("", 0, ()))


class Simulator:
    """One run of one configuration. The same arguments give the same run."""

    def __init__(
        self,
        config: Config,
        hello: WorkerHello,
        device: Device,
        timing: Timing,
        arrivals: Sequence[Arrival],
        requests: Sequence[AddRequest],
        *,
        seed: int = 0,
        trace: StepTrace | None = None,
        encode_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """`requests`: the arrivals' messages, in order. `encode_seconds`: of an image, by its number of embeddings."""
        self.scheduler = Scheduler.for_worker(config, hello)
        self._timing = timing
        self._arrivals = arrivals
        self._requests = requests
        waits = frontend_waits([each.time for each in arrivals], timing.frontend)
        self._due = sorted(  # by arrival at the scheduler
            (each.time + wait + timing.request + timing.request_per_token * each.input_len, number)
            for number, (each, wait) in enumerate(zip(arrivals, waits, strict=True))
        )
        self._num_arrived = 0
        self._results: deque[tuple[float, StepResult]] = deque()
        stops_early = any(request.sampling.stop_token_ids for request in requests)
        output_lens = [each.output_len for each in arrivals] if stops_early else None
        self._worker = ModelledWorker(device, hello, timing, seed, output_lens, encode_seconds)
        self._trace = trace
        self.now = 0.0  # seconds of the run
        self._free_at = 0.0  # when the scheduler is done with its current message
        self._stats_at = self._watch_at = 0.0
        self.outcomes = [Outcome(each.time) for each in arrivals]
        self._gauge = Gauge(self.scheduler, {each.key: each.weight for each in arrivals})

    def run(self) -> Run:
        """Simulate until all requests have ended.

        Raises:
            StuckError: some never would.
        """
        while self.step():
            pass
        if self.scheduler.has_work:
            raise StuckError(f"{len(self.scheduler.requests)} requests wait, and nothing will change that")
        return Run(self.outcomes, self.scheduler.totals, self._gauge.samples, self._gauge.shares(), self._worker.busy)

    def step(self) -> bool:
        """Process the next event; False if there will be none."""
        due, results = self._due, self._results
        arrival_at = due[self._num_arrived][0] if self._num_arrived < len(due) else inf
        result_at = results[0][0] if results else inf
        wakes_at = max(self.scheduler.wakes_at, self.now) + _WAKE_DELAY
        encoded_at = self._worker.encoded_at
        next_at = min(arrival_at, result_at, encoded_at, wakes_at)
        if next_at == inf:
            return False
        now = self.now = max(self._free_at, next_at)
        if now >= self._stats_at:
            self.scheduler.bound_queue(now)
            self._stats_at = now + STATS_INTERVAL
        if now >= self._watch_at:
            for deltas in self.scheduler.expire_queued(now).values():
                self._tell([TokenBatch(0, tuple(deltas))], now)
            self._watch_at = now + _WATCH_INTERVAL
        if result_at <= now:
            result = results.popleft()[1]
            told = self.scheduler.process(result, now)
            if self._trace is not None:
                self._trace.returned(result, now, 0.0, self.scheduler.outcome)
            now = self._free_at = now + self._timing.scheduler
            self._pump(now)
            self._tell(told.values(), now)
        elif encoded_at <= now:
            for message in self._worker.take_encoded(now):
                self.scheduler.answered(message)
            self._pump(now)
        else:
            if arrival_at <= now:
                self._arrive_together(now)
            self._pump(max(now, self._free_at))
        self._gauge.note(now)
        return True

    def _arrive_together(self, now: float) -> None:
        """Add the requests that have arrived by now, and those that were sent while the first one woke the scheduler.

        The first one's way (`request`) includes the waking. No request is added before it is sent.
        """
        due, timing = self._due, self._timing
        until = now if self._results else now + min(timing.wake, timing.request)
        while self._num_arrived < len(due) and due[self._num_arrived][0] <= until:
            self._arrive(due[self._num_arrived][1], now)
            self._num_arrived += 1
        self._free_at = now + timing.admission

    def _arrive(self, number: int, now: float) -> None:
        refusal = self.scheduler.add_request(self._requests[number], _OWNER, now)
        if refusal is not None:
            self.outcomes[number].end(now, 0, refusal.code)

    def _pump(self, now: float) -> None:
        scheduler, trace = self.scheduler, self._trace
        while scheduler.can_schedule:
            step = scheduler.schedule(now, with_record=trace is not None)
            if scheduler.ended:
                self._tell([TokenBatch(0, tuple(deltas)) for deltas in scheduler.take_ended().values()], now)
            if orders := scheduler.take_messages(before_plan=True):
                self._worker.take_orders(orders, now)
            if step is None:
                return
            if trace is not None:
                trace.planned(step.plan.step_id, step.record, self._timing.scheduler * 1e6, now)
            self._results.append(self._worker.execute(step.plan, now))

    def _tell(self, told: Iterable[TokenBatch], now: float) -> None:
        outcomes, heard = self.outcomes, now + self._timing.reply
        for batch in told:
            for delta in batch.deltas:
                number = int(delta.request_id)
                outcome = outcomes[number]
                if outcome.first_token is None and delta.token_ids:
                    outcome.first_token = heard + self._timing.first
                    outcome.num_cached = delta.num_cached_tokens
                if delta.finish_reason is not None:
                    arrival = self._arrivals[number]
                    num_tokens = min(arrival.output_len, self.scheduler.limits.max_sequence_len - arrival.input_len)
                    if delta.error_code is not None:
                        num_tokens = 0
                    outcome.end(max(heard, outcome.first_token or 0.0), num_tokens, delta.error_code or "")
