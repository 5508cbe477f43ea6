"""The routes, declared once: listeners and the API's description (`openapi.py`) are generated from them.

There is one file for each API, and parts bring routes of their own (`FrontendPart.routes`). To add an API, put its
handlers into a folder of their own, and add a file here and a line below, or make it a part.
"""

from penstock.frontend.api.service import Service
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.http.openapi import document
from penstock.frontend.http.routes import (
    anthropic,
    batches,
    conversations,
    embeddings,
    ollama,
    openai,
    operations,
    responses,
    streams,
    web,
)
from penstock.frontend.part import routes_of_parts


async def _show_openapi(service: Service, record: RequestRecord, body: bytes) -> Reply:
    is_admin_apart = service.config.frontend.admin_address is not None
    return Reply(document(tuple(route for route in ROUTES if not (is_admin_apart and route.is_for_admins))))


ROUTES: tuple[Route, ...] = (
    *openai.ROUTES,
    *embeddings.ROUTES,
    *responses.ROUTES,
    *conversations.ROUTES,
    *streams.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *batches.ROUTES,
    *operations.ROUTES,
    *web.ROUTES,
    *routes_of_parts(),
    Route("GET", "/openapi.json", _show_openapi, "This description", errors=(500,)),
)
