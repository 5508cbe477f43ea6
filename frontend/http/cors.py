"""Which web pages may use this server from a browser, by the CORS protocol of https://fetch.spec.whatwg.org.

A page of another origin gets no CORS headers, so its browser hides the answer from it. Credentials that a browser adds
by itself (cookies) are never allowed: a key is a header that the page must know.
"""

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from penstock.ipc.version import NAME

_METHODS = "GET, POST, DELETE"
_EXPOSED = "Retry-After, x-request-id, x-should-retry, x-penstock-warning"
_MAX_AGE_SECONDS = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9._-]+(, ?[A-Za-z0-9._-]+)*")


def allow_origins(app: web.Application, origins: tuple[str, ...]) -> None:
    """Let pages of these origins read the answers of `app`, and no others; without any, nothing changes."""
    if not origins:
        return

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add("Vary", "Origin")  # otherwise a cache would give one origin's answer to another
        origin = request.headers.get("Origin")
        if origin in origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    @web.middleware
    async def preflight(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a preflight: without a key, and in the same way for all paths."""
        is_asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not is_asked or request.headers.get("Origin") not in origins:
            return await handler(request)
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_SECONDS)}
        names = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(names):  # client libraries add their own: allow whichever the page wants
            headers["Access-Control-Allow-Headers"] = names
        return web.Response(status=204, headers=headers | {"Server": NAME})

    app.middlewares.insert(0, preflight)
    app.on_response_prepare.append(tell)
