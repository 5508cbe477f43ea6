"""Computes recorded plans again: the same batches with the same pages, step by step.

Only the worker runs, in the recorded order of events: each plan is launched where it was sent, and its result is
compared where it arrived. A sequence that enters a row has its recorded tokens. So a difference comes from that step
itself, or from pages and tokens that an earlier step left.
"""

from collections import deque
from collections.abc import Iterator

from msgspec.structs import replace

from penstock.gpu_worker.steps.host_step import PendingStep
from penstock.in_process import InProcessEngine
from penstock.ipc.codec import pack_int32, unpack_int32
from penstock.ipc.messages import NewRow, StepPlan
from penstock.parts.grammars.messages import PrepareGrammar
from penstock.parts.recording.lines import NewSequence, Plan, Result, Worker
from penstock.parts.recording.reader import Run
from penstock.replay.outcome import Name, StepOutcome, first_difference


class PlanReplay:
    """Replays one run on an engine's worker with the recorded sizes, which must not be used otherwise."""

    def __init__(self, engine: InProcessEngine, run: Run) -> None:
        """`check_plans` must accept the run."""
        self._engine = engine
        self._runner = engine.runner
        self._run = run
        self._results = {event.step: event for event in run.events if isinstance(event, Result)}
        self._known: dict[Name, list[int]] = {}  # each sequence's tokens, as recorded
        self._rows: dict[int, Name] = {}
        self._pending: deque[tuple[StepPlan, list[Name], PendingStep]] = deque()
        self._grammars: set[int] = set()

    def steps(self) -> Iterator[StepOutcome]:
        """The outcome of each step that had a result."""
        for event, plan in self._run.with_plans():
            match event:
                case Worker() if not event.is_repeated:
                    self._pending.clear()
                    self._rows.clear()
                    self._grammars.clear()
                    self._runner.clear_rows()
                case Plan() if plan is not None and event.step in self._results:  # else the worker died
                    self._launch(event, plan)
                case Result() if self._pending and self._pending[0][0].step_id == event.step:
                    yield self._compare(event)

    def _launch(self, event: Plan, plan: StepPlan) -> None:
        rows = tuple(map(self._new_row, event.new))
        sampling = [row for row, samples in zip(unpack_int32(plan.rows), plan.samples, strict=True) if samples]
        launched = self._runner.launch(replace(plan, new_rows=rows))
        self._pending.append((plan, [self._rows[row] for row in sampling], launched))

    def _new_row(self, new: NewSequence) -> NewRow:
        name = new.id, new.seq
        recorded = self._run.requests[new.id]
        tokens = self._known.setdefault(name, recorded.known_at_first(new.seq))
        del tokens[new.num_tokens :]  # these were drawn for a row that the sequence had lost by then
        self._rows[new.row] = name
        sampling = recorded.sampling()
        if new.grammar_id and new.grammar_id not in self._grammars:
            self._grammars.add(new.grammar_id)
            self._engine.have_done(PrepareGrammar(new.grammar_id, sampling.grammar, sampling.grammar_bytes))
        seed = (sampling.seed + new.seq) % 2**63
        return NewRow(
            new.row,
            pack_int32(tokens),
            recorded.arrival.num_tokens,
            replace(sampling, seed=seed, grammar="", prompt_logprobs=-1),
            new.pages,
            new.grammar_id,
        )

    def _compare(self, recorded: Result) -> StepOutcome:
        plan, names, launched = self._pending.popleft()
        result = launched.result()
        expected, got = unpack_int32(recorded.token_ids).tolist(), unpack_int32(result.token_ids).tolist()
        counts = unpack_int32(recorded.num_tokens).tolist() if recorded.num_tokens else [1] * len(names)
        owners = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        for name, token in zip(owners, expected, strict=True):
            self._known[name].append(token)
        failed = {index for index, _ in recorded.failed}
        position = first_difference(expected, got)
        if position < 0 or position in failed:
            return StepOutcome(plan.step_id, len(expected))
        at = min(position, len(owners) - 1)
        was, now = (tokens[position] if position < len(tokens) else None for tokens in (expected, got))
        return StepOutcome(plan.step_id, len(expected), owners[at], was, now)
