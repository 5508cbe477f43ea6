"""The Responses API and conversations in a frontend."""

from penstock.frontend.part import FrontendPart
from penstock.parts.responses.frontend import conversation_routes, routes
from penstock.parts.responses.frontend.part import StoredResponses


class ResponseRoutes(FrontendPart):
    """The routes; what they store is in `StoredResponses`."""

    routes = (*routes.ROUTES, *conversation_routes.ROUTES)


PARTS = (StoredResponses, ResponseRoutes)
