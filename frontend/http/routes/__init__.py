"""The routes, declared once: listeners and the API's description (`openapi.py`) are generated from them.

There is one file for each API of the spine. Parts bring routes of their own, and dialects, which answer at the paths of
others (`FrontendPart`). To add an API, make it a part.
"""

from dataclasses import replace

from penstock.frontend.api.service import Service
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.http.openapi import document
from penstock.frontend.http.routes import (
    embeddings,
    openai,
    operations,
    streams,
    web,
)
from penstock.frontend.part import dialects_of_parts, routes_of_parts


async def _show_openapi(service: Service, record: RequestRecord, body: bytes) -> Reply:
    is_admin_apart = service.config.frontend.admin_address is not None
    return Reply(document(tuple(route for route in ROUTES if not (is_admin_apart and route.is_for_admins))))


DIALECTS = dialects_of_parts()


def _with_dialects(route: Route) -> Route:
    """The route, with what dialects have in its place."""
    place = (route.method, route.path)
    found = [(each.header, other) for each in DIALECTS for other in each.routes if (other.method, other.path) == place]
    return replace(route, for_header=tuple(found)) if found else route


ROUTES: tuple[Route, ...] = tuple(
    map(
        _with_dialects,
        (
            *openai.ROUTES,
            *embeddings.ROUTES,
            *streams.ROUTES,
            *operations.ROUTES,
            *web.ROUTES,
            *routes_of_parts(),
            Route("GET", "/openapi.json", _show_openapi, "This description", errors=(500,)),
        ),
    )
)
