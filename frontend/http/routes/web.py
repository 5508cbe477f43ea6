"""The page, for browsers."""

from penstock.frontend.exchange.exchange import Route
from penstock.frontend.web import page

ROUTES = (
    Route("GET", "/", page.page, "The page, for a browser; for others, where to go from here", scope="", is_quiet=True),
    Route(
        "GET", "/ui/{id}", page.file, "A file of the page", errors=(404, 500), content_type="text/html",
        argument="[A-Za-z0-9_./-]+", scope="", is_quiet=True,
    ),
)  # fmt: skip
