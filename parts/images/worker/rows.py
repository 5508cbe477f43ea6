"""Rows with pictures in their prompts: which positions take which embeddings, and how their 3D positions count."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from penstock.config import Config
from penstock.gpu_worker.devices.device import Device, Int32Array
from penstock.gpu_worker.models.model import ImageInputs, Model, SeesImages, WholeImage
from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.gpu_worker.steps.made_up_plans import MANY_TOKENS, SOME_TOKENS, Limits, MadeUpRow, made_up_plan
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.messages import NewRow, PixelRef, PixelTensor, RowImage, StepPlan, StepResult, ToWorker, WorkerHello
from penstock.models.description.decoder import Decoder
from penstock.models.vision.foreign import ForeignVision
from penstock.models.vision.grid import GridVision
from penstock.models.vision.tower import VisionTower
from penstock.parts.images.messages import DropEmbedding, EncodeImage, ImageEncoded
from penstock.parts.images.worker.store import EmbeddingStore

EMBEDDING_BYTES = 512 << 20
"""Bytes of all embeddings that are kept at a time."""

_Places = npt.NDArray[np.int64]


class _Row(NamedTuple):
    """A row with pictures."""

    images: tuple[tuple[RowImage, _Places], ...]  # each with the positions of its embeddings
    turns: _Places  # int64[3, P], time, row and column of the first P positions, if the model uses them
    rest: int  # what is added to the positions after the first P


class Images(RowPart):
    """The embeddings of pictures, and the rows that have pictures in their prompts."""

    orders = (EncodeImage, DropEmbedding)

    def __init__(self, store: EmbeddingStore, device: Device, *, turns: bool) -> None:
        """`turns`: whether positions have three parts (time, row and column)."""
        self.store = store
        self._device, self._turns = device, turns
        self.rows: dict[int, _Row] = {}

    @classmethod
    def device_bytes(cls, config: Config, model: Model) -> int:
        return EMBEDDING_BYTES if isinstance(model, SeesImages) and model.tower is not None else 0

    @classmethod
    def of(cls, context: Context) -> "Images | None":
        model, config = context.model, context.model.config
        if not isinstance(model, SeesImages) or model.tower is None:
            return None
        ropes = [its.rope for _, its in config.attentions] if isinstance(config, Decoder) else []
        turns = any(rope is not None and rope.sections for rope in ropes)
        return cls(EmbeddingStore(model.tower), context.device, turns=turns)

    def hello(self, hello: WorkerHello) -> WorkerHello:
        tower = self.store.tower
        return replace(
            hello,
            max_embedding_bytes=EMBEDDING_BYTES,
            embedding_bytes=tower.embedding_bytes,
            images_are_whole=tower.vision.is_whole,
        )

    def warm_up(self, limits: Limits) -> Iterator[StepPlan]:
        """A picture goes through the tower, and then through the decoder at the beginning of prompts.

        Its positions may have rows and columns, and may see each other.
        """
        vision, key = self.store.tower.vision, bytes(32)
        grid = vision.small_grid
        count, shape = vision.num_embeddings(grid), vision.pixel_shape(grid)
        image = RowImage(key, 0, count, count, grid, embedding_id=1)
        longest = max(1, limits.max_model_len - 1)
        if count > longest or (vision.is_whole and count > limits.max_num_batched_tokens):
            return  # a request with a picture has no room either
        if isinstance(vision, ForeignVision):
            self.store.make_up(1, count)  # which pixels it takes, only its processor knows
        else:
            pixels = bytes(4 * prod(shape))
            tensors = (PixelTensor("pixel_values", "float32", shape, 0),)
            self.store.order(EncodeImage(1, key, grid, count, PixelRef("", len(pixels), tensors, pixels)))
            while (encoded := self.store.encode(1.0)) is None:
                pass
            if encoded.error:
                raise RuntimeError(f"the vision tower cannot be warmed up: {encoded.error}")
        for length in sorted({min(max(count, least), longest) for least in (2, SOME_TOKENS, MANY_TOKENS)}):
            chunk = min(length, limits.max_num_batched_tokens)
            batches = [[MadeUpRow(length, chunk)], [MadeUpRow(length)]]  # no graph covers a decode step of it
            if limits.max_num_seqs > 1 and chunk < limits.max_num_batched_tokens:
                batches.append([MadeUpRow(length, chunk), MadeUpRow(1)])
            for rows in batches:
                yield _showing(made_up_plan(limits, rows), image, vision.image_token)

    @property
    def is_busy(self) -> bool:
        return self.store.is_busy

    @property
    def is_due(self) -> bool:
        return self.store.is_due

    def order(self, message: EncodeImage | DropEmbedding) -> None:
        self.store.order(message)

    def work(self, coming: ToWorker | None) -> ImageEncoded | None:
        return self.store.work(coming)

    def end_step(self, result: StepResult) -> None:
        self.store.end_step(result)

    def clear(self) -> None:
        self.rows.clear()
        self.store.clear()

    def enter(self, plan: StepPlan) -> None:
        for row in np.frombuffer(plan.freed_rows, np.int32).tolist():
            self.rows.pop(row, None)
        for new in plan.new_rows:
            self.rows.pop(new.row, None)
            if new.images:
                self.rows[new.row] = _entered(new, self.store.tower.vision, self._turns)

    def inputs(self, batch: HostBatch) -> ImageInputs | None:
        """The step's image inputs; None if no row of the step has pictures."""
        if not any(row in self.rows for row in batch.rows.tolist()):
            return None
        places, embeddings, turns, wholes, first = [], [], [], [], 0
        rows = zip(batch.rows.tolist(), batch.start.tolist(), batch.num_new.tolist(), strict=True)
        for i, (row, start, num_new) in enumerate(rows):
            its, end = self.rows.get(row), start + num_new
            if self._turns:
                turns.append(_turns(its, start, end))
            for image, its_places in () if its is None else its.images:
                begin, behind = np.searchsorted(its_places, (start, end)).tolist()
                if begin < behind:
                    if self.store.tower.vision.is_whole:
                        wholes.append(_whole(i, int(its_places[begin]), int(its_places[-1]) + 1, start, end, first))
                    places.append(its_places[begin:behind] - start + first)
                    embeddings.append(self.store.embeddings(image.embedding_id)[begin:behind])
            first += num_new
        upload = self._device.upload
        return ImageInputs(
            upload(np.concatenate(places)) if places else None,
            torch.cat(embeddings) if embeddings else None,
            upload(np.concatenate(turns, axis=1)) if self._turns else None,
            tuple(wholes),
            upload(_last_seen(batch, wholes)) if wholes else None,
            self.store.tower.vision.is_whole_in_windows,
        )


def _last_seen(batch: HostBatch, wholes: Sequence[WholeImage]) -> Int32Array:
    """int32[T], the last position that each token of the step sees: its own, or the last one of its picture."""
    rows = zip(batch.start.tolist(), batch.num_new.tolist(), strict=True)
    seen = np.concatenate([np.arange(start, start + num_new, dtype=np.int32) for start, num_new in rows])
    for its in wholes:
        seen[its.first_token : its.first_token + its.end - its.begin] = its.end - 1
    return seen


def _whole(row: int, begin: int, behind: int, start: int, end: int, first_token: int) -> WholeImage:
    """The part of a picture in positions [begin, behind) that is in a chunk of positions [start, end)."""
    if behind > end:
        raise RuntimeError(f"a chunk ends at {end}, inside of a picture that ends at {behind}")
    return WholeImage(row, first_token + begin - start, begin, behind)


def _turns(row: _Row | None, start: int, end: int) -> _Places:
    """int64[3, positions]."""
    later = np.arange(start, end)
    if row is None:
        return np.broadcast_to(later, (3, end - start))
    known = row.turns[:, start:end]
    return np.concatenate(
        (known, np.broadcast_to(later[known.shape[1] :] + row.rest, (3, end - start - known.shape[1]))), 1
    )


def _entered(new: NewRow, vision: VisionTower, turns: bool) -> _Row:
    """A new row. The embeddings of each picture go to the image tokens among its positions, in order."""
    token_ids = np.frombuffer(new.token_ids, np.int32)
    images = []
    for image in new.images:
        its = token_ids[image.start : image.start + image.length] == vision.image_token
        places = np.flatnonzero(its) + image.start
        if len(places) != image.num_embeddings:
            raise ValueError(f"an image of {image.num_embeddings} embeddings has {len(places)} placeholders")
        images.append((image, places))
    if not turns or not isinstance(vision, GridVision | ForeignVision) or not vision.merge:
        return _Row(tuple(images), np.empty((3, 0), np.int64), 0)
    return _Row(tuple(images), *_counted(images, vision))


def _counted(images: Sequence[tuple[RowImage, _Places]], vision: GridVision | ForeignVision) -> tuple[_Places, int]:
    """Time, row and column of all positions up to the last picture's end, and what is added to later positions."""
    parts, behind, at = [], 0, 0
    for image, places in images:
        first = int(places[0])
        frames, rows, columns = image.grid[0], image.grid[1] // vision.merge, image.grid[2] // vision.merge
        parts.append(np.broadcast_to(np.arange(first - behind) + at, (3, first - behind)))
        at += first - behind
        parts.append(np.stack([part.reshape(-1) for part in np.indices((frames, rows, columns))]) + at)
        at += max(rows, columns)
        behind = first + len(places)
    return np.concatenate(parts, axis=1), at - behind


def _showing(plan: StepPlan, image: RowImage, image_token: int) -> StepPlan:
    """The same plan with a picture at the beginning of its first row."""
    first, *others = plan.new_rows
    token_ids = np.frombuffer(first.token_ids, dtype=np.int32).copy()
    token_ids[: image.length] = image_token
    first = replace(first, token_ids=token_ids.tobytes(), images=(image,))
    return replace(plan, new_rows=(first, *others))
