"""Its routes."""

from penstock.frontend.part import FrontendPart
from penstock.parts.ollama.frontend.routes import ROUTES


class Ollama(FrontendPart):
    """Chats, completions, vectors and models."""

    routes = ROUTES


PARTS = (Ollama,)
