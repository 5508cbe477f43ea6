"""Step costs and the times around steps, fitted to recorded steps.

    seconds = w0 + w1 decodes + w2 positions in their contexts
              + w3 chunks + w4 tokens of chunks + w5 (token, position) pairs

as in `core/steps/prefill_pace.py`, by least squares of relative errors with Huber's weights (1964), and no weight
below zero. The residuals are kept in order of time, and simulated steps walk through them, those with chunks through
the residuals of steps with chunks. So simulated steps vary as the recorded ones did, and a slow step is followed by
steps as slow as in the recording. A stall adds the same number of seconds to a simulated step, whatever the step's
length.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from typing import ClassVar, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.lab.simulation.device import StepShape, Timing

Floats = npt.NDArray[np.float64]
_Value = TypeVar("_Value")

_FEWEST_STEPS = 20
_STALLED = 1.5  # times the expected time; the rest is a stall
_HUBER = 1.5  # relative errors beyond this many typical ones count less
_NUM_ROUNDS = 20
_NUM_SWEEPS = 300
_SHORTEST = 0.05  # quantile of the measured ways taken as one without waiting


class MeasuredStep(NamedTuple):
    """A recorded step. Times are seconds; `sent` and `received` by the scheduler's clock."""

    shape: StepShape
    forward: float
    idle: float  # the device's idle time before it; negative: an image was encoded meanwhile
    sent: float
    received: float
    scheduler: float = 0.0  # the scheduler's time for the step; 0: not recorded


class Spread(msgspec.Struct, frozen=True):
    """How recorded steps, at least one, deviated from their expected times, in order."""

    ratios: tuple[float, ...]  # actual to expected time, up to a bound
    stalls: tuple[float, ...]  # seconds beyond the bound: another process had the processor, whatever the step's length

    @classmethod
    def of(cls, actual: Floats, expected: Floats) -> Self:
        """Make it from the actual and the expected seconds of steps."""
        bound = np.minimum(actual, _STALLED * expected)
        return cls(tuple((bound / expected).tolist()), tuple((actual - bound).tolist()))


class FittedDevice(msgspec.Struct, frozen=True):
    """A device model fitted to a measured worker."""

    overlaps_copies: ClassVar[bool] = False
    stages: ClassVar[tuple[float, ...]] = (1.0,)

    weights: tuple[float, ...]  # seconds per part
    decode_spread: Spread  # of steps without chunks
    chunk_spread: Spread
    decode_gaps: tuple[float, ...]  # seconds before steps without chunks that follow such a step
    chunk_gaps: tuple[float, ...]  # before others: rows begin there, or are handed from chunks to decodes
    error: float  # typical relative error of a recorded step

    def walk(self, seed: int) -> "FittedWalk":
        """Go through the recorded run again, from a random moment on."""
        return FittedWalk(self, random.Random(seed).random())

    def expected(self, shape: StepShape) -> float:
        """Return the mean seconds of a step of this shape."""
        one, row, context, chunk, token, pair = self.weights
        decodes, chunks = shape
        seconds = one + row * len(decodes) + context * sum(decodes)
        for start, count in chunks:
            seconds += chunk + count * (token + pair * (start + 0.5 * count))
        return seconds


class FittedWalk:
    """Steps that deviate from their expected times as those of the recorded run did, one after the other."""

    def __init__(self, device: FittedDevice, start: float) -> None:
        """`start`: the part of the recorded run, in [0, 1), that comes last."""
        self._expected = device.expected
        decode, chunk = device.decode_spread, device.chunk_spread
        self._decodes = _from(start, list(zip(decode.ratios, decode.stalls, strict=True)))
        self._chunks = _from(start, list(zip(chunk.ratios, chunk.stalls, strict=True)))
        self._decode_gaps, self._chunk_gaps = _from(start, device.decode_gaps), _from(start, device.chunk_gaps)
        self._had_chunks = False

    def seconds(self, shape: StepShape) -> float:
        ratio, stall = next(self._chunks if shape.chunks else self._decodes)
        return self._expected(shape) * ratio + stall

    def gap(self, shape: StepShape) -> float:
        had_chunks, self._had_chunks = self._had_chunks, bool(shape.chunks)
        return next(self._chunk_gaps if had_chunks or shape.chunks else self._decode_gaps)


def _from(start: float, values: Sequence[_Value]) -> Iterator[_Value]:
    """Yield all of them in a circle, from this part of them on."""
    place = int(start * len(values))
    return cycle([*values[place:], *values[:place]])


def fit_device(steps: Sequence[MeasuredStep]) -> FittedDevice:
    """Fit a device to a run's steps; the first few are left out, because they may be slow.

    Raises:
        ConfigError: there are too few.
    """
    steps = steps[min(5, len(steps) // 10) :]
    if len(steps) < _FEWEST_STEPS:
        raise ConfigError(f"{len(steps)} recorded steps are too few: step costs are fitted to {_FEWEST_STEPS} and more")
    parts = np.array([_parts(step.shape) for step in steps])
    actual = np.array([step.forward for step in steps])
    weights = _robust_weights(parts, actual)
    expected = np.maximum(parts @ weights, 1e-9)
    has_chunks = parts[:, 3] > 0
    decodes, chunks = (of if of.any() else ~of for of in (~has_chunks, has_chunks))
    decode_gaps, chunk_gaps = list[float](), list[float]()
    for earlier, step in pairwise(steps):
        if step.sent < earlier.received and step.idle >= 0:
            (chunk_gaps if earlier.shape.chunks or step.shape.chunks else decode_gaps).append(step.idle)
    return FittedDevice(
        tuple(weights.tolist()),
        Spread.of(actual[decodes], expected[decodes]),
        Spread.of(actual[chunks], expected[chunks]),
        tuple(decode_gaps or chunk_gaps) or (0.0,),
        tuple(chunk_gaps or decode_gaps) or (0.0,),
        float(np.median(np.abs(actual / expected - 1))),
    )


class EncodeCosts(NamedTuple):
    """Seconds of a vision tower per image: a constant, plus a part per embedding, plus a part per pair of them."""

    one: float
    embedding: float
    pair: float

    def seconds(self, num_embeddings: int) -> float:
        """Return the seconds for an image."""
        return self.one + num_embeddings * (self.embedding + self.pair * num_embeddings)


def fit_encoding(encoded: Sequence[tuple[int, float]]) -> EncodeCosts:
    """Fit the costs to images, given as (number of embeddings, seconds)."""
    # The embeddings' column is first: if all images have equally many, it gets the whole cost.
    parts = np.array([(count, 1.0, count * count) for count, _ in encoded])
    embedding, one, pair = _robust_weights(parts, np.array([seconds for _, seconds in encoded])).tolist()
    return EncodeCosts(one, embedding, pair)


def fit_timing(steps: Sequence[MeasuredStep]) -> Timing:
    """Derive the times around steps from the scheduler's clock. It does not see clients, so their delays stay 0."""
    asleep, awake = list[float](), list[float]()
    for earlier, step in pairwise(steps):
        way = max(0.0, step.received - step.sent - step.forward)
        (asleep if step.sent > earlier.received else awake).append(way)
    woken = float(np.median(asleep)) if asleep else 0.0
    # A plan sent before the last result came may have waited for the worker: the shortest ways waited least.
    transport = min(woken, float(np.quantile(awake, _SHORTEST))) if awake else woken
    scheduler = [step.scheduler for step in steps]
    return Timing(
        scheduler=float(np.median(scheduler)) if scheduler else 0.0,
        transport=transport,
        wake=woken - transport,
    )


def _parts(shape: StepShape) -> tuple[float, ...]:
    decodes, chunks = shape
    num_tokens = sum(count for _, count in chunks)
    num_pairs = sum(count * (start + 0.5 * count) for start, count in chunks)
    return 1.0, len(decodes), sum(decodes), len(chunks), num_tokens, num_pairs


def _robust_weights(parts: Floats, actual: Floats) -> Floats:
    trust = np.ones(len(actual))
    expected = actual
    weights = np.zeros(parts.shape[1])
    for _ in range(_NUM_ROUNDS):
        # Errors are relative to the expected time: relative to the actual one, the quicker of equal steps count more.
        weights = _nonnegative(parts / expected[:, None], actual / expected, trust, weights)
        expected = np.maximum(parts @ weights, 1e-3 * float(np.median(actual)) + 1e-12)
        errors = np.abs(actual / expected - 1)
        bound = _HUBER * max(1.4826 * float(np.median(errors)), 1e-6)
        trust = np.minimum(1.0, bound / np.maximum(errors, 1e-12))
    return weights


def _nonnegative(parts: Floats, actual: Floats, trust: Floats, weights: Floats) -> Floats:
    """Solve weighted least squares for non-negative weights, by coordinate descent on columns of equal size."""
    size = np.sqrt(np.maximum((parts**2 * trust[:, None]).sum(axis=0), 1e-300))
    scaled = parts / size
    products = scaled.T @ (scaled * trust[:, None])
    targets = scaled.T @ (actual * trust)
    found = weights * size
    for _ in range(_NUM_SWEEPS):
        for i in range(len(found)):
            if products[i, i] > 0:
                found[i] = max(0.0, found[i] + (targets[i] - products[i] @ found) / products[i, i])
    return np.asarray(found / size)
