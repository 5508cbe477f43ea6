"""The observers of an engine: the step trace, the recorder, and the feed for watching frontends.

Without observers, a step costs only a test of one attribute (`are_there`).
"""

from collections.abc import Callable, Sequence
from time import monotonic

from penstock.config import Config
from penstock.core.engine.step_trace import StepTrace
from penstock.core.engine.watchers import Broadcaster, Watchers
from penstock.core.recording.recorder import Recorder
from penstock.core.scheduling.scheduler import ScheduledStep, Scheduler
from penstock.core.sequences.intake import Refusal
from penstock.core.watching.feed import Feed
from penstock.ipc.channel import PeerId
from penstock.ipc.messages import (
    AbortRequest,
    AddRequest,
    ImageEncoded,
    PauseRequest,
    ResumeRequest,
    SequenceDelta,
    StepResult,
    TokenBatch,
    WatchSteps,
    WorkerHello,
)
from penstock.ipc.messages.watching import Question
from penstock.parts.recording.options import RecordingOptions


class Observers:
    """Passes events to the observers that exist, in the order in which they happen."""

    def __init__(self, config: Config, channel: Broadcaster) -> None:
        """`channel`: to the frontends."""
        options = config.of(RecordingOptions)
        self.trace = StepTrace(options.step_trace) if options.step_trace else None
        self.recorder = Recorder(config) if options.record else None
        self.feed: Feed | None = None
        self.want_records = self.trace is not None
        """Whether steps must be planned with records."""
        self.are_there = self.trace is not None or self.recorder is not None
        """Whether any observer needs to hear of steps."""
        self._channel = channel
        self._watchers: Watchers | None = None  # until a frontend asks for something

    # --- watchers -------------------------------------------------------------------------------

    def on_watcher(self, peer: PeerId, order: WatchSteps | Question, scheduler: Callable[[], Scheduler | None]) -> None:
        """A frontend watches the engine's steps, or asks a question about its state."""
        if self._watchers is None:
            self._watchers = Watchers(self._channel, scheduler, self._show_to)
        if isinstance(order, WatchSteps):
            self._watchers.watch(peer, order)
        else:
            self._watchers.ask(peer, order)

    def _show_to(self, feed: Feed | None) -> None:
        self.feed = feed
        self.are_there = not (feed is None and self.trace is None and self.recorder is None)

    # --- what happens ---------------------------------------------------------------------------

    def on_workers(self, hello: WorkerHello) -> None:
        """Workers are ready, with empty rows."""
        if self.recorder is not None:
            self.recorder.on_workers(hello)

    def on_reset(self) -> None:
        """The prefix cache is about to be dropped."""
        if self.recorder is not None:
            self.recorder.on_reset()

    def on_request(self, request: AddRequest, scheduler: Scheduler | None, refusal: Refusal | None) -> None:
        """A request has arrived, and was accepted or refused."""
        if self.recorder is not None:
            self.recorder.on_request(request, scheduler, refusal)
        if self.feed is not None:
            self.feed.on_request(request, monotonic())

    def on_steer(self, order: AbortRequest | PauseRequest | ResumeRequest, scheduler: Scheduler) -> None:
        """A live request is about to be steered by its frontend."""
        if self.recorder is not None:
            self.recorder.on_steer(order)
        if self.feed is not None:
            self.feed.on_steer(order, scheduler.requests[order.request_id], monotonic())

    def on_frontend_gone(self, peer: PeerId, scheduler: Scheduler | None) -> None:
        """All requests of a frontend are about to be aborted."""
        if self.recorder is not None:
            self.recorder.on_owner_gone(peer)
        if self.feed is not None and scheduler is not None:
            self.feed.on_owner_gone(peer, scheduler, monotonic())
        if self._watchers is not None:
            self._watchers.remove(peer)

    def on_deltas(self, deltas: Sequence[SequenceDelta], scheduler: Scheduler | None) -> None:
        """Deltas are sent to a frontend other than with a step's tokens."""
        if self.recorder is not None:
            self.recorder.on_deltas(deltas)
        if self.feed is not None:
            self.feed.on_deltas(deltas, scheduler, monotonic())

    def on_image(self, message: ImageEncoded, scheduler: Scheduler) -> None:
        """An image was embedded, or could not be; the scheduler does not know yet."""
        if self.recorder is not None and scheduler.images is not None:
            self.recorder.on_image(message, scheduler.images.num_embeddings(message.embedding_id))

    def planned(self, step: ScheduledStep, scheduler: Scheduler, started: float) -> None:
        """A step was planned since `started` (monotonic seconds), and is sent now."""
        sent = monotonic()
        if self.trace is not None:
            self.trace.planned(step.plan.step_id, step.record, (sent - started) * 1e6, sent)
        if self.recorder is not None:
            self.recorder.on_plan(step.plan, scheduler)
        if self.feed is not None:
            self.feed.planned(step, scheduler, started, sent)

    def returned(self, result: StepResult, told: Sequence[TokenBatch], scheduler: Scheduler, received: float) -> None:
        """A step's result, which came at `received`, was applied; `told` was sent to the frontends."""
        if self.trace is not None:
            self.trace.returned(result, received, (monotonic() - received) * 1e6, scheduler.drafting.of_last)
        if self.recorder is not None:
            self.recorder.on_result(result, told)
        if self.feed is not None:
            self.feed.returned(result, told, scheduler, received)

    def forget_planned(self) -> None:
        """The worker is gone; the results of its steps will not come."""
        if self.trace is not None:
            self.trace.forget_planned()
        if self.feed is not None:
            self.feed.forget_planned(monotonic())

    def flush(self) -> None:
        """Write buffered lines."""
        if self.trace is not None:
            self.trace.flush()

    def close(self) -> None:
        """Write what is pending, and stop."""
        if self._watchers is not None:
            self._watchers.close()
        if self.trace is not None:
            self.trace.close()
        if self.recorder is not None:
            self.recorder.close()
