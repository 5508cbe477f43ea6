"""Rows with pictures in their prompts: which positions take which embeddings, and how their 3D positions count."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.gpu_worker.devices.device import Device, Int32Array
from penstock.gpu_worker.images.store import EmbeddingStore
from penstock.gpu_worker.models.model import ImageInputs, WholeImage
from penstock.gpu_worker.steps.host_step import HostBatch
from penstock.ipc.messages import NewRow, RowImage, StepPlan
from penstock.models.vision.grid import GridVision
from penstock.models.vision.tower import VisionTower

_Places = npt.NDArray[np.int64]


class _Row(NamedTuple):
    """A row with pictures."""

    images: tuple[tuple[RowImage, _Places], ...]  # each with the positions of its embeddings
    turns: _Places  # int64[3, P], time, row and column of the first P positions, if the model uses them
    rest: int  # what is added to the positions after the first P


class ImageRows:
    """Created with the first row that has pictures; steps without such rows do not use it."""

    def __init__(self, store: EmbeddingStore, device: Device, *, turns: bool) -> None:
        """`turns`: whether positions have three parts (time, row and column)."""
        self._store, self._device, self._turns = store, device, turns
        self._rows: dict[int, _Row] = {}

    @property
    def rows(self) -> Sequence[int]:
        """The rows that have pictures now."""
        return tuple(self._rows)

    def apply(self, plan: StepPlan) -> None:
        """Forget the rows that a plan frees, and add its new rows that have pictures."""
        for row in np.frombuffer(plan.freed_rows, np.int32).tolist():
            self._rows.pop(row, None)
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            if new.images:
                self._rows[new.row] = _entered(new, self._store.tower.vision, self._turns)

    def inputs(self, batch: HostBatch) -> ImageInputs | None:
        """The step's image inputs; None if no row of the step has pictures."""
        if not any(row in self._rows for row in batch.rows.tolist()):
            return None
        places, embeddings, turns, wholes, first = [], [], [], [], 0
        rows = zip(batch.rows.tolist(), batch.start.tolist(), batch.num_new.tolist(), strict=True)
        for i, (row, start, num_new) in enumerate(rows):
            its, end = self._rows.get(row), start + num_new
            if self._turns:
                turns.append(_turns(its, start, end))
            for image, its_places in () if its is None else its.images:
                begin, behind = np.searchsorted(its_places, (start, end)).tolist()
                if begin < behind:
                    if self._store.tower.vision.is_whole:
                        wholes.append(_whole(i, int(its_places[begin]), int(its_places[-1]) + 1, start, end, first))
                    places.append(its_places[begin:behind] - start + first)
                    embeddings.append(self._store.embeddings(image.embedding_id)[begin:behind])
            first += num_new
        upload = self._device.upload
        return ImageInputs(
            upload(np.concatenate(places)) if places else None,
            torch.cat(embeddings) if embeddings else None,
            upload(np.concatenate(turns, axis=1)) if self._turns else None,
            tuple(wholes),
            upload(_last_seen(batch, wholes)) if wholes else None,
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
    if not turns or not isinstance(vision, GridVision):
        return _Row(tuple(images), np.empty((3, 0), np.int64), 0)
    return _Row(tuple(images), *_counted(images, vision))


def _counted(images: Sequence[tuple[RowImage, _Places]], vision: GridVision) -> tuple[_Places, int]:
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
