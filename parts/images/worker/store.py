"""The embeddings of pictures. They are made between steps, part by part of the tower's work, and kept until dropped."""

import time
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.models.vision.tower import Tower
from penstock.ipc import faults, shared_files
from penstock.ipc.messages import PixelRef, StepPlan, StepResult, ToWorker
from penstock.models.vision.foreign import ForeignVision
from penstock.parts.images.messages import DropEmbedding, EncodeImage, ImageEncoded
from penstock.parts.images.worker.turns import Turns

_DTYPES = {name: np.dtype(name) for name in ("float32", "int64", "int32", "uint8", "bool")}
"""Of what frontends send."""


class PixelsLostError(Exception):
    """The process that made the pixels has ended, or has given up the request."""


class _Encoding:
    """A picture on its way through the tower."""

    def __init__(self, message: EncodeImage) -> None:
        self.message = message
        self.parts: Iterator[Tensor | None] | None = None  # None: not begun yet
        self.seconds = 0.0


class EmbeddingStore:
    """See the module. Only `encode` computes."""

    def __init__(self, tower: Tower) -> None:
        self.tower = tower
        self._made: dict[int, Tensor] = {}
        self._waiting: deque[_Encoding] = deque()
        self._before, self._before_these = faults.point("worker.encode"), faults.point_about("worker.encode")
        self._turns = Turns()

    @property
    def is_busy(self) -> bool:
        """Whether there are pictures to embed."""
        return bool(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether it is the tower's turn, and there are pictures to embed."""
        return bool(self._waiting) and self._turns.is_towers(time.perf_counter())

    def end_step(self, result: StepResult) -> None:
        """A step has been computed."""
        self._turns.stepped(result.num_forward_us / 1e6)

    def work(self, coming: ToWorker | None) -> ImageEncoded | None:
        """See `WorkerPart`."""
        if isinstance(coming, StepPlan) and self._turns.yields_to(coming):
            return None
        return self.encode()

    def embeddings(self, embedding_id: int) -> Tensor:
        """[embeddings, H]. Raises KeyError if they are not ready."""
        return self._made[embedding_id]

    def order(self, message: EncodeImage | DropEmbedding) -> None:
        """Begin to make a picture's embeddings, or forget them."""
        if isinstance(message, EncodeImage):
            self._waiting.append(_Encoding(message))
            return
        self._made.pop(message.embedding_id, None)
        kept = (each for each in self._waiting if each.message.embedding_id != message.embedding_id)
        self._waiting = deque(kept)

    def make_up(self, embedding_id: int, num_embeddings: int) -> None:
        """Have embeddings of no picture, for the warm-up."""
        tower = self.tower
        self._made[embedding_id] = torch.zeros(num_embeddings, tower.vision.width, device=tower.device)

    def clear(self) -> None:
        """Forget all."""
        self._made.clear()
        self._waiting.clear()

    @torch.inference_mode()
    def encode(self, seconds: float | None = None) -> ImageEncoded | None:
        """Go on with the oldest picture for about this many seconds (None: for one turn), but at least by one part.

        Returns:
            The answer once the picture is ready or has failed.
        """
        if not self._waiting:
            return None
        began = time.perf_counter()
        try:
            return self._work(self._waiting[0], began, began + (self._turns.length if seconds is None else seconds))
        finally:
            self._turns.encoded(began, time.perf_counter())

    def _work(self, encoding: _Encoding, began: float, until: float) -> ImageEncoded | None:
        message, made = encoding.message, None
        try:
            if encoding.parts is None:
                self._before()
                if self._before_these is not None:
                    self._before_these([message.num_embeddings])
                pixels = self._checked(message)
                encoding.parts = self.tower.encode(pixels, message.grid)
            while (made := next(encoding.parts)) is None and time.perf_counter() < until:
                pass
        except (ValueError, PixelsLostError) as error:
            self._waiting.popleft()
            return ImageEncoded(message.embedding_id, error=str(error), is_lost=isinstance(error, PixelsLostError))
        encoding.seconds += time.perf_counter() - began
        if made is None:
            return None
        self._waiting.popleft()
        self._made[message.embedding_id] = made
        return ImageEncoded(message.embedding_id, int(encoding.seconds * 1e6))

    def _checked(self, message: EncodeImage) -> Tensor | Mapping[str, Tensor]:
        """The pixel values, checked against the grid; for a tower of `transformers`, all that its processor made.

        Raises:
            PixelsLostError: the pixels are gone.
            ValueError: the tower does not take such pixels.
        """
        vision = self.tower.vision
        if vision.num_embeddings(message.grid) != message.num_embeddings:
            raise ValueError("the image's grid does not fit its placeholders")
        if isinstance(vision, ForeignVision):
            return {tensor.name: read_pixels(message.pixels, tensor.name) for tensor in message.pixels.tensors}
        pixels = read_pixels(message.pixels, "pixel_values")
        wanted = vision.pixel_shape(message.grid)
        if tuple(pixels.shape) != wanted:
            raise ValueError(f"pixel_values has shape {list(pixels.shape)}, but the image's grid needs {list(wanted)}")
        return pixels


def read_pixels(pixels: PixelRef, name: str) -> Tensor:
    """One of the tensors that the processor made.

    Raises:
        PixelsLostError: the pixels are gone.
        ValueError: there is no such tensor, or it exceeds its memory.
    """
    its = next((tensor for tensor in pixels.tensors if tensor.name == name), None)
    dtype = None if its is None else _DTYPES.get(its.dtype)
    if its is None or dtype is None:
        raise ValueError(f"the image has no {name}")
    count = 1
    for size in its.shape:
        count *= size
    memory: bytes | bytearray = pixels.inline
    if not memory:
        try:
            memory = shared_files.read(pixels.segment, pixels.num_bytes)
        except OSError:
            raise PixelsLostError("the image's pixels are gone") from None
    if not count or its.offset % dtype.itemsize or its.offset + dtype.itemsize * count > len(memory):
        raise ValueError(f"{name} is not within the image's memory")
    return torch.from_numpy(np.frombuffer(memory, dtype, count, its.offset).reshape(its.shape).copy())
