"""Reranking, scores and classes of texts."""

from penstock.frontend.part import FrontendPart
from penstock.parts.scores.frontend.part import Scores
from penstock.parts.scores.frontend.routes import ROUTES


class ScoreRoutes(FrontendPart):
    """The routes; what they know of the model is in `Scores`."""

    routes = ROUTES


PARTS = (Scores, ScoreRoutes)
