"""A worker that computes nothing: it predicts when a step would end, and which sequences would end with it."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from penstock.ipc.messages import Message, StepPlan, StepResult, WorkerHello
from penstock.ipc.messages.worker import ON_DEVICE
from penstock.lab.simulation.device import Device, StepShape, Timing
from penstock.lab.simulation.tower import ModelledTower
from penstock.parts.images.messages import DropEmbedding, EncodeImage, ImageEncoded

TOKEN, STOP = 1, 2
"""Ids of the tokens that the worker returns."""

_ROUNDING = 1e-9  # tolerance for sums of seconds
_TOKENS = TOKEN.to_bytes(4, "little") * 4096  # for as many rows as there can be


class ModelledWorker:
    """Executes plans in order. Like a real worker, it knows only what plans say about a sequence.

    A sequence's seed is its request's number, which is the index of its output length in `output_lens`.
    """

    def __init__(
        self,
        device: Device,
        hello: WorkerHello,
        timing: Timing,
        seed: int,
        output_lens: Sequence[int] | None,
        encode_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """`output_lens`: None if every sequence ends at its max_tokens."""
        self._tower = None if encode_seconds is None else ModelledTower(encode_seconds)
        self._device = device
        self._one_way = timing.transport / 2
        self._wake, self._naps_after = timing.wake, timing.scheduler + _ROUNDING
        self._walk = device.walk(seed)
        self._output_lens = output_lens
        self._num_left = np.zeros(hello.max_num_seqs, dtype=np.int64)  # tokens until a row's last one
        self._copy_seconds = hello.page_bytes / hello.host_copy_speed if hello.host_copy_speed else 0.0  # per page
        self._told = -1.0  # when the scheduler gets the last result
        self._ended = [-1.0] * len(device.stages)  # end of the last step in each stage; negative: none yet
        self._drawn = np.full(hello.max_num_seqs, -1.0)  # when the first stage knows a row's last token
        self._copied = 0.0  # when the last copy between device and host ended
        self._stepped = 0.0  # seconds in steps, of all stages together

    @property
    def busy(self) -> float:
        """Seconds spent in steps, over all stages, and on images."""
        return self._stepped + (0.0 if self._tower is None else self._tower.busy)

    @property
    def encoded_at(self) -> float:
        """When the scheduler will hear of the next image, if no step comes first."""
        return inf if self._tower is None else self._tower.ready_at + self._one_way

    def take_orders(self, orders: Sequence[Message], sent: float) -> None:
        """Take the orders that the scheduler sent at `sent`; those about images take time."""
        if self._tower is not None:
            about_images = [order for order in orders if isinstance(order, EncodeImage | DropEmbedding)]
            self._tower.order(about_images, sent + self._one_way)

    def take_encoded(self, now: float) -> list[ImageEncoded]:
        """Return the messages about images that the scheduler has got by now."""
        return [] if self._tower is None else self._tower.take_encoded(now - self._one_way + _ROUNDING)

    def execute(self, plan: StepPlan, sent: float) -> tuple[float, StepResult]:
        """Compute a plan sent at `sent`; return when the scheduler has the result, and the result."""
        device, shape = self._device, shape_of(plan)
        gap = self._walk.gap(shape)
        arrived = sent + self._one_way + (self._wake if sent > self._told + self._naps_after else 0.0)
        rows = np.frombuffer(plan.rows, dtype=np.int32)
        began = self._begin(0, arrived, gap)
        if len(self._ended) > 1:
            self._drawn[[new.row for new in plan.new_rows]] = -1.0
            began = max(began, float(self._drawn[rows].max(initial=-1.0)))
        num_moved = len(plan.copy_tiers) - plan.copy_tiers.count(ON_DEVICE)
        copy_seconds = num_moved * self._copy_seconds
        if num_moved:
            self._copied = max(self._copied, arrived if device.overlaps_copies else began) + copy_seconds
            began = max(began, self._copied)
        if self._tower is not None:
            began = self._tower.free_at(began)
        seconds = self._walk.seconds(shape)
        idle = began - self._ended[0] if self._ended[0] >= 0 else 0.0
        for stage, part in enumerate(device.stages):
            began = self._begin(stage, began, gap)
            began = self._ended[stage] = began + seconds * part
        if len(self._ended) > 1:
            self._drawn[rows[np.frombuffer(plan.samples, dtype=np.bool_)]] = began
        self._stepped += seconds
        if self._tower is not None:
            self._tower.stepped(began, seconds)
        result = StepResult(
            plan.step_id,
            self._tokens(plan),
            max(1, round(seconds * 1e6)),
            round(idle * 1e6),
            num_copied_pages=num_moved,
            num_copy_us=round(copy_seconds * 1e6),
        )
        self._told = began + self._one_way
        return self._told, result

    def _begin(self, stage: int, at: float, gap: float) -> float:
        """Return when a stage begins a step whose input is there from `at` on."""
        ended = self._ended[stage]
        return at if ended < 0 else max(at, ended + gap)

    def _tokens(self, plan: StepPlan) -> bytes:
        if self._output_lens is None:
            return _TOKENS[: 4 * plan.samples.count(1)]
        for row in plan.new_rows:
            num_outputs = len(row.token_ids) // 4 - row.num_prompt_tokens
            self._num_left[row.row] = self._output_lens[row.sampling.seed] - num_outputs
        sampling = np.frombuffer(plan.rows, dtype=np.int32)[np.frombuffer(plan.samples, dtype=np.bool_)]
        self._num_left[sampling] -= 1
        return np.where(self._num_left[sampling] <= 0, np.int32(STOP), np.int32(TOKEN)).tobytes()


def shape_of(plan: StepPlan) -> StepShape:
    """Return the shape of a plan. A chunk of one position costs as much as a decode."""
    starts, counts = memoryview(plan.start).cast("i").tolist(), memoryview(plan.num_new).cast("i").tolist()
    if sum(counts) == len(counts):
        return StepShape(starts, [])
    return StepShape(
        [start for start, count in zip(starts, counts, strict=True) if count == 1],
        [(start, count) for start, count in zip(starts, counts, strict=True) if count > 1],
    )
