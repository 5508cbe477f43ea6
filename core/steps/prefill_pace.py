"""How many prompt tokens a step may compute beside decodes, so that streams do not wait long for their next token.

A step's time is predicted from its parts (`StepTime`), so steps in flight, whose times are unknown yet, do not matter.
Before anything is known, and where a prediction would be far from past steps, chunks grow by a factor from the largest
one that has returned.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from math import inf, sqrt
from operator import mul

from penstock.core.sequences.sequence import Request
from penstock.core.steps.plan_builder import Chunk, DecodeBatch, InFlightStep, PaceInputs
from penstock.ipc.messages import StepResult

MIN_TOKENS = 16  # so that prompts make progress, however slow the device is
_FIRST_TOKENS = 64
_GROWTH = 4
_DECODES_BETWEEN = 64
"""One step without prompts in this many is used for learning."""

_TOLERANCE = 1.1
_SPREAD_UP, _SPREAD_DOWN, _MAX_RATIO = 0.25, 0.02, 4.0
"""Step times vary, and even long ones should keep the bound: use a ratio that is rarely exceeded, not the mean."""

_SCALES = (1.0, 1 / 64, 1 / 65536, 1 / 256, 1 / 262144)
"""These scale the parts of a usual step to about one."""

_CHUNKS_PER_STAGE, _LEAST_CHUNK = 4, 128
"""A pipeline computes a prompt in pieces, so that its stages work on different ones at once. With n pieces on S stages,
(S - 1) / n of the time is lost while it fills and drains. Very small pieces lose more: each reads all weights."""

Rates = tuple[float, float, float, float, float]
"""Microseconds per step, row that decodes, token in its context, prompt token, and (token, context) pair."""

_FORGETTING = 0.97
_RIDGE = 1e-3
_NUM_SWEEPS = 4
_MAX_SURPRISE = 3.0
"""A step counts as at most this many times as long as predicted. A longer one has another cause: a stopped process, or
a page read from disk."""

_NUM_FIRST = 4
"""The first steps, this many, are believed whatever they took."""


def parts_of(num_decodes: int, num_context_tokens: int, chunks: list[tuple[int, int]]) -> PaceInputs:
    """Return the parts that the weights multiply; `chunks` are (start, number of tokens)."""
    num_tokens = sum(num_new for _, num_new in chunks)
    num_pairs = sum(num_new * (start + num_new / 2) for start, num_new in chunks)
    one, rows, context, tokens, pairs = _SCALES
    return one, num_decodes * rows, num_context_tokens * context, num_tokens * tokens, num_pairs * pairs


class LeastSquares:
    """Learns non-negative weights of parts from values that are about `sum(weight * part)`.

    Older values count less and less. Parts should be scaled to about one.
    """

    __slots__ = ("_num_first", "_num_learned", "_products", "_targets", "weights")

    def __init__(self, num_parts: int, num_first: int) -> None:
        """`num_first`: how many first values are believed whatever they are."""
        self._products = [[0.0] * num_parts for _ in range(num_parts)]
        self._targets = [0.0] * num_parts
        self._num_first = num_first
        self._num_learned = 0
        self.weights = [0.0] * num_parts

    @property
    def is_known(self) -> bool:
        """Whether enough has been seen."""
        return self._num_learned >= self._num_first

    def learn(self, parts: ListOf[float], value: float) -> None:
        """Learn from one value, which is positive."""
        expected = value
        if self.is_known:
            expected = max(self.predict(parts), 1.0)
            value = min(value, _MAX_SURPRISE * expected)
        self._num_learned += 1
        # Errors are relative, so that a long step does not outweigh many short ones. They are relative to the expected
        # time: relative to the actual one, the quicker of equal steps would count for more.
        weight = 1 / max(expected, 1.0) ** 2
        for i, row in enumerate(self._products):
            part = parts[i] * weight
            self._targets[i] = self._targets[i] * _FORGETTING + part * value
            for j, other in enumerate(parts):
                row[j] = row[j] * _FORGETTING + part * other
        self._solve()

    def _solve(self) -> None:
        """Gauss-Seidel iterations from the previous weights, each kept at zero or above."""
        weights, ridge = self.weights, _RIDGE * max(self._products[i][i] for i in range(len(self.weights)))
        for _ in range(_NUM_SWEEPS):
            for i, row in enumerate(self._products):
                if row[i] <= 0:
                    continue
                others = sum(row[j] * weights[j] for j in range(len(row))) - row[i] * weights[i]
                # The ridge pulls towards the previous weight: weights that recent steps do not determine stay.
                weights[i] = max(0.0, (self._targets[i] - others + ridge * weights[i]) / (row[i] + ridge))

    def predict(self, parts: ListOf[float]) -> float:
        """Return the expected value for these parts."""
        return sum(weight * part for weight, part in zip(self.weights, parts, strict=True))


class StepTime(LeastSquares):
    """How long a step takes, learned from earlier steps on this machine.

        microseconds = w0 + w1 rows that decode + w2 tokens in their contexts + w3 prompt tokens
                       + w4 (token, context) pairs

    The last part makes a chunk more expensive the further into its prompt it is, because each of its tokens attends
    to all tokens before it.

    `learn` costs about ten microseconds, so it is used only for steps with prompts, and a few others.
    """

    __slots__ = ("rates",)

    def __init__(self) -> None:
        super().__init__(len(_SCALES), _NUM_FIRST)
        self.rates: Rates = (1.0, 0.0, 0.0, 0.0, 0.0)
        """The learned rates; before that, every step is expected to take the same time."""

    def learn(self, parts: ListOf[float], value: float) -> None:
        """Learn from a step with these parts that took this long."""
        super().learn(parts, value)
        if self.is_known:
            fixed, row, context, token, pair = map(mul, self.weights, _SCALES)
            self.rates = fixed, row, context, token, pair

    def tokens_within(self, num_us: float, start: int) -> int:
        """Return how many tokens a chunk from position `start` on may have, if it may add `num_us` to a step."""
        per_pair = self.weights[4] * _SCALES[4]
        per_token = self.weights[3] * _SCALES[3] + per_pair * start
        if num_us <= 0:
            return 0
        if per_pair * num_us < 1e-9 * max(per_token, 1e-9) ** 2:
            return int(min(num_us / per_token, 1 << 30)) if per_token > 0 else 1 << 30
        return int(min((sqrt(per_token**2 + 2 * per_pair * num_us) - per_token) / per_pair, 1 << 30))


def chunk_for_stages(num_pending: int, num_stages: int) -> int:
    """Return how many prompt tokens a step should have, so that all stages are busy while `num_pending` are left."""
    return max(_LEAST_CHUNK, -(-num_pending // (_CHUNKS_PER_STAGE * num_stages)))


class Room:
    """The room left for prompts in a step. Some requests may get only a part of it (`limit`)."""

    __slots__ = ("_num_us", "_pace", "_parts", "num_tokens")

    def __init__(self, num_tokens: int, num_us: float | None = None, pace: "PrefillPace | None" = None) -> None:
        """`num_us`: time for prompts, in addition to the decodes; None for unlimited."""
        self.num_tokens = num_tokens
        """Most tokens, whatever time they take."""
        self._num_us = num_us
        self._pace = pace
        self._parts: list[tuple[Callable[[Request], bool], Room]] = []

    def limit(self, is_limited: Callable[[Request], bool], part: "Room") -> None:
        """Let these requests have only a part of the room."""
        self._parts.append((is_limited, part))

    @property
    def has_limits(self) -> bool:
        """Whether there may be requests that get only a part."""
        return bool(self._parts)

    def is_limited(self, request: Request) -> bool:
        """Whether the request gets only a part."""
        return any(is_limited(request) for is_limited, _ in self._parts)

    def tokens_from(self, start: int) -> int:
        """Return how many tokens a chunk from this position may have; 0 if there is no room."""
        if self._num_us is None or self._pace is None:
            return self.num_tokens
        return min(self.num_tokens, self._pace.tokens_within(self._num_us, start))

    def tokens_for(self, request: Request, start: int) -> int:
        """Return how many tokens the request's chunk from `start` on may have; 0 if there is no room."""
        most = self.tokens_from(start)
        for is_limited, part in self._parts:
            if is_limited(request):
                most = min(most, part.tokens_for(request, start))
        return most

    def use(self, request: Request, start: int, num_new: int) -> None:
        """A chunk of the request was launched."""
        self.num_tokens -= num_new
        if self._num_us is not None and self._pace is not None:
            self._num_us -= self._pace.chunk_us(start, num_new)
        for is_limited, part in self._parts:
            if is_limited(request):
                part.use(request, start, num_new)


class PrefillPace:
    """Bounds the prompt tokens of a step, by times learned from results."""

    __slots__ = ("_largest", "_learns", "_max_us", "_num_decodes_since", "_spread", "_us_per_token", "step_time")

    def __init__(self, max_ms: int, *, learns: bool = False) -> None:
        """`max_ms`: longest time for a step with prompts; 0 for unlimited. `learns`: learn even without a limit."""
        self._max_us = max_ms * 1000
        self._learns = learns or max_ms > 0
        self.step_time = StepTime()
        self._largest = 0  # most prompt tokens of a returned step
        self._us_per_token = 0.0  # of the last step with prompts, over its whole time
        self._spread = 1.0  # ratio of a step's time to its prediction
        self._num_decodes_since = 0

    def learn(self) -> None:
        """Learn from now on, even without a limit."""
        self._learns = True

    def room(self, num_tokens: int, starts: list[int], longest_us: float = inf, guesses_us: float = 0.0) -> Room:
        """Return the room of a step with these decodes, given by their positions; `num_tokens` is its other limit.

        `longest_us`: time for this step, if it is less than the usual limit. `guesses_us`: what guesses add to it.
        """
        max_us = min(self._max_us or inf, longest_us)
        if not starts or max_us == inf:
            return Room(num_tokens)
        num_tokens = min(num_tokens, max(_FIRST_TOKENS, _GROWTH * self._largest))
        if not self.step_time.is_known:
            if self._us_per_token:
                num_tokens = min(num_tokens, max(MIN_TOKENS, int(max_us / self._us_per_token)))
            return Room(num_tokens)
        decodes_us = self.step_time.predict(parts_of(len(starts), sum(starts), []))
        num_us = min((self._max_us or inf) * _TOLERANCE, longest_us) / self._spread - decodes_us - guesses_us
        # Some tokens are always allowed, however long they take.
        return Room(num_tokens, max(num_us, self.chunk_us(0, MIN_TOKENS)), self)

    def tokens_within(self, num_us: float, start: int) -> int:
        """Return how many tokens a chunk may have; 0 if there is room only for very few."""
        return num if (num := self.step_time.tokens_within(num_us, start)) >= MIN_TOKENS else 0

    def chunk_us(self, start: int, num_new: int) -> float:
        """Return the microseconds that a chunk adds to a step."""
        return self.step_time.predict((0.0, *parts_of(0, 0, [(start, num_new)])[1:]))

    @property
    def is_known(self) -> bool:
        """Whether enough steps have been seen to predict others."""
        return self.step_time.is_known

    def decodes_us(self, num_rows: int, num_context_tokens: int) -> float:
        """Return the microseconds of a step of decodes with this many tokens in their contexts."""
        return self.step_time.predict(parts_of(num_rows, num_context_tokens, []))

    def compute_us(self, start: int, num_tokens: int) -> float:
        """Estimate the microseconds of computing `num_tokens` from position `start` on; 0: unknown."""
        return self.chunk_us(start, num_tokens) if self.step_time.is_known else self._us_per_token * num_tokens

    def recompute_us(self, num_tokens: int, step_tokens: int) -> float:
        """Return the microseconds of computing this many positions in steps of at most `step_tokens`; 0 if unknown."""
        if not self.step_time.is_known:
            return 0.0
        num_steps = -(-num_tokens // step_tokens)
        return self.chunk_us(0, num_tokens) + (num_steps - 1) * self.step_time.predict(parts_of(0, 0, []))

    def predicted(self, starts: list[int], chunks: list[Chunk]) -> tuple[PaceInputs, int] | None:
        """Return a step's parts and its predicted microseconds (0 if unknown); None if nothing is learned."""
        if not self._learns or not chunks:
            return None
        parts = parts_of(len(starts), sum(starts), [(chunk.start, chunk.num_new) for chunk in chunks])
        return parts, round(self.step_time.predict(parts)) if self.step_time.is_known else 0

    def note(self, step: InFlightStep, result: StepResult, guesses_us: float = 0.0) -> None:
        """A step has returned; `guesses_us` of its time went into guesses, which predictions do not cover."""
        num_us = result.num_forward_us
        if not num_us or not self._learns:
            return
        if guesses_us:
            num_us -= min(int(guesses_us), num_us // 2)
        if step.predicted is None:
            if step.num_drafts:
                return
            self._num_decodes_since += 1
            if self._num_decodes_since >= _DECODES_BETWEEN:
                self._num_decodes_since = 0
                self.step_time.learn(_parts_of_decodes(step.decodes), num_us)
            return
        parts, predicted_us = step.predicted
        num_tokens = sum(chunk.num_new for chunk in step.chunks)
        self._largest = max(self._largest, num_tokens)
        self._us_per_token = num_us / num_tokens
        if predicted_us and step.decodes.seqs:
            ratio = min(num_us / predicted_us, _MAX_RATIO)
            self._spread += (ratio - self._spread) * (_SPREAD_UP if ratio > self._spread else _SPREAD_DOWN)
            self._spread = max(1.0, self._spread)
        self.step_time.learn(parts, num_us)


def _parts_of_decodes(decodes: DecodeBatch) -> PaceInputs:
    return parts_of(len(decodes.seqs), sum(seq.num_computed_tokens for seq in decodes.seqs), [])
