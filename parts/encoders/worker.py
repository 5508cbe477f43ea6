"""What an encoder must know of its rows beside their tokens: where the second text of a pair begins."""

import numpy as np
import structlog
import torch
from msgspec.structs import replace

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.encoder import EncoderModel
from penstock.gpu_worker.part import Context
from penstock.gpu_worker.steps.row_part import RowPart
from penstock.ipc.messages import StepPlan, WorkerHello

log = structlog.get_logger()


class Pairs(RowPart):
    """Tells the model of pairs as their rows come; does nothing in steps."""

    def __init__(self, model: EncoderModel, device: Device) -> None:
        self._model = model
        self._device = device

    @classmethod
    def of(cls, context: Context) -> "Pairs | None":
        model = context.model
        return cls(model, context.device) if isinstance(model, EncoderModel) else None

    def hello(self, hello: WorkerHello) -> WorkerHello:
        """Texts are whole, so no text is longer than a step."""
        most = hello.max_num_batched_tokens
        if most < hello.max_model_len:
            log.info("texts are limited by a step's tokens", max_num_batched_tokens=most, positions=hello.max_model_len)
        return replace(hello, texts_are_whole=True, max_model_len=min(most, hello.max_model_len))

    def enter(self, plan: StepPlan) -> None:
        if self._model.config.num_types < 2 or not plan.new_rows:
            return
        rows = [new.row for new in plan.new_rows]
        begins = [0 if new.sampling.pooling is None else new.sampling.pooling.second_from for new in plan.new_rows]
        uploaded = self._device.upload(np.array([rows, begins], dtype=np.int32))
        with torch.inference_mode():
            self._model.set_pair(uploaded[0].long(), uploaded[1])


PARTS = (Pairs,)
