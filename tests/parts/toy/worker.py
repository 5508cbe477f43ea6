"""In a worker: it counts what the scheduler tells it."""

from penstock.gpu_worker.part import Context, WorkerPart
from tests.parts.toy.messages import ToyCounted, ToyLeft


class Counting(WorkerPart):
    """Adds up, beside the steps."""

    orders = (ToyLeft,)

    def __init__(self) -> None:
        self._num_requests = 0
        self._answers: list[ToyCounted] = []

    @classmethod
    def of(cls, context: Context) -> "Counting":
        return cls()

    def order(self, message: ToyLeft) -> None:
        self._num_requests += message.num_requests
        self._answers.append(ToyCounted(self._num_requests))

    @property
    def is_busy(self) -> bool:
        return bool(self._answers)

    def take_done(self) -> list[ToyCounted]:
        answers, self._answers = self._answers, []
        return answers


PARTS = (Counting,)
