"""What a frontend knows of how its model scores; the routes find it by `service.parts.get`."""

from typing import Any, Self

from penstock.frontend.part import FrontendPart
from penstock.parts.scores.frontend.model import ScoreModel


class Scores(FrontendPart):
    """Reads at the start how the model scores."""

    def __init__(self, model: ScoreModel) -> None:
        self.model = model

    @classmethod
    def of(cls, service: Any) -> Self:
        return cls(ScoreModel.of(service))
