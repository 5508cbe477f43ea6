"""Its routes."""

from penstock.frontend.part import FrontendPart
from penstock.parts.open_inference.frontend.routes import ROUTES


class OpenInference(FrontendPart):
    """Health, and what the server serves."""

    routes = ROUTES


PARTS = (OpenInference,)
