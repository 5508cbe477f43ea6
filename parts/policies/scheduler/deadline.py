"""Targets for the first token and for those after it (TTFT and TPOT): the request with the least slack goes first.

    slack      time until its next token is due, less the time to compute it, estimated from steps so far
    on time    slack is not negative: key (0, time at which it will be), which does not change while it waits
    late       it can no longer meet its targets: demoted or, under deadline-refuse, refused
    the rest   without targets, or demoted: key (1, 0), in turns as under fcfs, behind all that are on time

A client's deadline (`seconds_left`) is also a target for the first token, if it is nearer.
"""

from collections.abc import Iterable
from math import ceil, inf
from operator import attrgetter

from penstock.core.sequences.intake import Refusal
from penstock.core.sequences.sequence import Key, Request, Sequence
from penstock.core.steps.plan_builder import InFlightStep
from penstock.parts.policies.scheduler.policy import Policy
from penstock.parts.policies.scheduler.view import Rows

_REST: Key = (1, 0.0)
_LEAST_PART = 0.1
"""Prompts get at least this part of the longest time for a step, so that decodes do not stop them."""

_SMOOTHING = 0.2

_num_computed_tokens = attrgetter("num_computed_tokens")


class Deadline(Policy):
    """Earliest slack first.

    A request that is on time takes the row of one of the rest. When pages run out, one of the rest yields first, then
    the request with the most slack. No request joins if steps would then exceed the tightest time per token that a
    running request asks for; chunks of prompts are cut to that time, too.

    The bound: one of the rest that has waited for `max_delay` seconds comes before all that are on time, in turns with
    others like it, and keeps its row. It then waits at most until a running sequence ends.
    """

    preempts = True
    max_delay = 60.0
    refuses_late = False

    def __init__(self) -> None:
        self._counted: tuple[Rows | None, int] = (None, 0)
        self._load = 0, 0, inf
        self._step_us = 0.0  # of recent steps with prompts
        self._of_rest: dict[Request, None] = {}  # requests of the rest that ever had a row
        self._paced: dict[Request, None] = {}  # requests with a target for later tokens that ever had a row

    def key(self, request: Request, now: float) -> Key:
        if not request.has_targets or request.late:
            return _REST
        if not request.first_token_at and (found := self._why_late(request, now)) is not None:
            request.late = found.reason
            return _REST
        return 0, self._latest_start(request)

    def renews_at(self, request: Request, now: float) -> float:
        is_judged = request.has_targets and not request.late and not request.first_token_at
        return self._latest_start(request) if is_judged else inf

    def refusal(self, request: Request, now: float) -> Refusal | None:
        return self._why_late(request, now) if self.refuses_late and request.has_targets else None

    def on_admitted(self, request: Request, num_tokens: int) -> None:
        num_rows, num_context, tightest = self._load
        if not request.has_targets or request.late:
            self._of_rest[request] = None
        elif request.seconds_per_token < inf:
            self._paced[request] = None
            tightest = min(tightest, request.seconds_per_token)
        self._load = num_rows + 1, num_context + request.num_prompt_tokens, tightest

    def on_gone(self, request: Request) -> None:
        self._paced.pop(request, None)
        self._of_rest.pop(request, None)

    def on_step(self, step: InFlightStep) -> None:
        if step.predicted is not None:
            self._step_us += (step.predicted[1] - self._step_us) * _SMOOTHING
        for chunk in step.chunks:
            request = chunk.seq.request
            if chunk.samples and not request.first_token_at:
                request.first_token_at = self.view.now

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=self._order_of_victims)

    def takes_rows(self, waiting: Sequence) -> bool:
        is_on_time = waiting.request.has_targets and not waiting.request.late
        return is_on_time and any(each.running for each in self._of_rest)

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        is_of_rest = not running.request.has_targets or bool(running.request.late)
        return is_of_rest and running.request.level > waiting.request.level

    def may_join(self, request: Request) -> bool:
        num_rows, num_tokens, tightest = self._current_load()
        if not request.late:
            tightest = min(tightest, request.seconds_per_token)
        if tightest == inf or request.is_overdue:
            return True
        return (
            not num_rows or self.view.decode_us(num_rows + 1, num_tokens + request.num_prompt_tokens) <= tightest * 1e6
        )

    def longest_step_us(self) -> float:
        return self._current_load()[2] * 1e6

    def _order_of_victims(self, seq: Sequence) -> tuple[bool, bool, float, int]:
        request = seq.request
        is_of_rest = not request.has_targets or bool(request.late)
        return not request.is_overdue, is_of_rest, self._due(request), seq.turn

    def _due(self, request: Request) -> float:
        """Return when the request's next token is due; inf if that token has no target."""
        if not request.first_token_at:
            return min(request.first_token_due, request.deadline)
        num_tokens = max((seq.num_outputs for seq in (*request.running, *request.waiting)), default=0)
        return min(request.first_token_at + request.seconds_per_token * (num_tokens + 1), request.deadline)

    def _latest_start(self, request: Request) -> float:
        return self._due(request) - self._seconds_to_token(request)

    def _why_late(self, request: Request, now: float) -> Refusal | None:
        """Return why a request that has no token yet cannot meet its targets, even if it got a row now."""
        view = self.view
        alone_us = view.decode_us(1, request.num_prompt_tokens)
        if alone_us > request.seconds_per_token * 1e6:
            asked = request.seconds_per_token * 1e3
            reason = f"a token for each {asked:.4g} ms was asked for, and one takes {alone_us / 1e3:.4g} ms here"
            return Refusal("unattainable", reason)
        due, seconds = self._due(request), self._seconds_to_token(request)
        if due - seconds > now:
            return None
        alone_us += view.prefill_us(request.num_prompt_tokens)
        if request.arrived and alone_us > (due - request.arrived) * 1e6:
            asked = (due - request.arrived) * 1e3
            reason = f"the first token was asked for within {asked:.4g} ms, and takes {alone_us / 1e3:.4g} ms here"
            return Refusal("unattainable", reason)
        left = f"is due in {(due - now) * 1e3:.0f} ms" if due > now else f"was due {(now - due) * 1e3:.0f} ms ago"
        waited = f", after {(now - request.arrived) * 1e3:.0f} ms in the queue" if request.arrived else ""
        return Refusal("late", f"the first token {left} and takes about {seconds * 1e3:.0f} ms from now{waited}")

    def _seconds_to_token(self, request: Request) -> float:
        """Return how long the request's next token takes once it has a row."""
        view, options = self.view, self.view.options
        num_cached = view.num_cached_tokens(request)
        num_tokens = max(request.num_prompt_tokens - num_cached, 1)
        prefill_us = view.prefill_us(num_tokens, num_cached)
        num_rows, num_context, tightest = self._current_load()
        decodes_us = view.decode_us(num_rows, num_context) if num_rows else 0.0
        num_steps = ceil(num_tokens / view.max_num_batched_tokens)
        longest_us = min(options.max_prefill_ms * 1e3 or inf, tightest * 1e6)
        if num_rows and longest_us < inf:
            room_us = max(longest_us - decodes_us, _LEAST_PART * longest_us)
            num_steps = max(num_steps, ceil(prefill_us / room_us))
        if not num_rows:
            return prefill_us * 1e-6
        # Its prompt may share steps with others: such steps, and those in flight, take as long as recent ones.
        usual_us = max(self._step_us, decodes_us)
        return (
            max(prefill_us + decodes_us * num_steps, usual_us * num_steps) + usual_us * options.pipeline_depth
        ) * 1e-6

    def _current_load(self) -> tuple[int, int, float]:
        """Return the running sequences, the tokens in their contexts, and the tightest target for their tokens.

        Counted when a sequence has left its row; the tokens computed since then are left out.
        """
        running = self.view.running
        if (running, running.num_left) != self._counted:
            self._counted = running, running.num_left
            paced = (each.seconds_per_token for each in self._paced if each.running and not each.late)
            self._load = len(running), sum(map(_num_computed_tokens, running)), min(paced, default=inf)
        return self._load


class DeadlineOrRefuse(Deadline):
    """The same, but a request that cannot meet its targets any more is refused: another server may meet them."""

    refuses_late = True
