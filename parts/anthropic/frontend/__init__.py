"""Its routes, and what its clients get at others' paths."""

from penstock.frontend.part import FrontendPart
from penstock.parts.anthropic.frontend.routes import DIALECT, ROUTES


class Anthropic(FrontendPart):
    """Messages and models."""

    routes = ROUTES
    dialect = DIALECT


PARTS = (Anthropic,)
