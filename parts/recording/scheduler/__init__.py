"""The recorder and the step trace, as an engine has them."""

from collections.abc import Collection
from collections.abc import Sequence as ListOf
from time import monotonic
from typing import TYPE_CHECKING, Self

from penstock.core.engine.part import EnginePart, Steering
from penstock.core.scheduling.scheduler import ScheduledStep
from penstock.core.sequences.intake import Refusal
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import AddRequest, Message, SequenceDelta, StepResult, TokenBatch, WorkerHello
from penstock.parts.recording.options import RecordingOptions
from penstock.parts.recording.scheduler.recorder import Recorder
from penstock.parts.recording.scheduler.step_trace import StepTrace

if TYPE_CHECKING:
    from penstock.core.engine.loop import Engine


class Recording(EnginePart):
    """Records the engine's run, with `--record`."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._recorder = Recorder(engine.config)

    @classmethod
    def of(cls, engine: "Engine") -> Self | None:
        return cls(engine) if engine.config.of(RecordingOptions).record else None

    def on_workers(self, hello: WorkerHello) -> None:
        self._recorder.on_workers(hello)

    def on_request(self, request: AddRequest, refusal: Refusal | None) -> None:
        self._recorder.on_request(request, self._engine.scheduler, refusal)

    def on_steer(self, order: Steering) -> None:
        self._recorder.on_steer(order)

    def on_cache_reset(self) -> None:
        self._recorder.on_reset()

    def on_frontend_gone(self, peer: PeerId) -> None:
        self._recorder.on_owner_gone(peer)

    def on_deltas(self, deltas: ListOf[SequenceDelta]) -> None:
        self._recorder.on_deltas(deltas)

    def on_made(self, message: Message) -> None:
        scheduler = self._engine.scheduler
        assert scheduler is not None, "it is a scheduler's part that was answered"
        what = scheduler.parts.recorded[type(message)](message)
        if what is not None:
            self._recorder.on_made(what)

    def planned(self, step: ScheduledStep, started: float) -> None:
        assert self._engine.scheduler is not None, "it has planned the step"
        self._recorder.on_plan(step.plan, self._engine.scheduler)

    def returned(self, result: StepResult, told: Collection[TokenBatch], received: float) -> None:
        self._recorder.on_result(result, told)

    def stats(self) -> dict[str, int]:
        return {"num_recording_lines_lost": self._recorder.num_lost}

    def close(self) -> None:
        self._recorder.close()


class Tracing(EnginePart):
    """Writes a line for each step, with `--step-trace`."""

    wants_records = True

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._trace = StepTrace(engine.config.of(RecordingOptions).step_trace)

    @classmethod
    def of(cls, engine: "Engine") -> Self | None:
        return cls(engine) if engine.config.of(RecordingOptions).step_trace else None

    def planned(self, step: ScheduledStep, started: float) -> None:
        sent = monotonic()
        self._trace.planned(step.plan.step_id, step.record, (sent - started) * 1e6, sent)

    def returned(self, result: StepResult, told: Collection[TokenBatch], received: float) -> None:
        assert self._engine.scheduler is not None, "it has planned the step"
        self._trace.returned(result, received, (monotonic() - received) * 1e6, self._engine.scheduler.outcome)

    def on_workers_lost(self) -> None:
        self._trace.forget_planned()

    def beat(self, now: float) -> None:
        self._trace.flush()

    def close(self) -> None:
        self._trace.close()


PARTS = (Recording, Tracing)
