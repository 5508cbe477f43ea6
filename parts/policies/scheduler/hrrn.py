"""Highest response ratio next."""

from penstock.core.sequences.output_lengths import LengthPredictor
from penstock.core.sequences.sequence import Key, Request
from penstock.parts.policies.scheduler.policy import Policy
from penstock.parts.policies.scheduler.work import predicted_us

_LEAST_SECONDS = 0.001
"""Least time until a key is recomputed."""


class HighestResponseRatioNext(Policy):
    """By the response ratio (waiting time + predicted work) / predicted work, highest first (P. Brinch Hansen, 1971).

    Short jobs go first, but long ones gain on them by waiting. Ratios between two powers of two are one class, in which
    requests go in turns. So a key changes a few times in a request's life, not in each step.

    The bound: a request that has waited for `max_delay` seconds comes before all classes. (The ratio alone gives no
    bound: a stream of ever shorter jobs could hold back a long one for as long as it lasts.)
    """

    max_delay = 60.0

    def __init__(self) -> None:
        self._lengths = LengthPredictor()
        self._jobs: dict[Request, tuple[float, float]] = {}  # predicted seconds, and when its class changes

    def key(self, request: Request, now: float) -> Key:
        job = self._jobs.get(request)
        seconds = job[0] if job is not None else predicted_us(request, self._lengths, self.view) / 1e6
        waited = request.waited(now)
        ratio = int(1 + waited / seconds)
        number = ratio.bit_length()
        self._jobs[request] = seconds, now + max(seconds * ((1 << number) - 1) - waited, _LEAST_SECONDS)
        return (-number,)

    def renews_at(self, request: Request, now: float) -> float:
        return self._jobs[request][1]

    def on_finished(self, request: Request, num_outputs: int) -> None:
        self._lengths.learn(request, num_outputs)

    def predicted_outputs(self, request: Request) -> float:
        return self._lengths.predict(request)

    def on_gone(self, request: Request) -> None:
        del self._jobs[request]
