"""Steps, pages and queue of engines, for administrators and for the web UI."""

from penstock.frontend.part import FrontendPart
from penstock.parts.watching.frontend.routes import ROUTES


class Watching(FrontendPart):
    """Asks engines for what they do while clients watch (`feeds.py`)."""

    routes = ROUTES


PARTS = (Watching,)
