"""Which web pages may use this server from a browser, by the CORS protocol of https://fetch.spec.whatwg.org.

A page of another origin gets no CORS headers, so its browser hides the answer from it. Credentials that a browser adds
by itself (cookies) are never allowed: a key is a header that the page must know.
"""

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from penstock.ipc.version import NAME

_METHODS = "GET, POST, DELETE"
_EXPOSED = "Retry-After, x-request-id, x-should-retry, x-penstock-stream, x-penstock-warning"
_MAX_AGE_SECONDS = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9._-]+(, ?[A-Za-z0-9._-]+)*")


class Cors:
    """Lets pages of these origins, and no others, read answers; without origins, answers get no CORS headers."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self.origins = origins

    def headers(self, origin: str | None) -> dict[str, str]:
        """The headers of every answer to a request with this Origin."""
        if not self.origins:
            return {}
        vary = {"Vary": "Origin"}  # otherwise a cache could give one origin's answer to another
        if origin not in self.origins:
            return vary
        return vary | {"Access-Control-Allow-Origin": origin or "", "Access-Control-Expose-Headers": _EXPOSED}

    def preflight(self, method: str, header: Callable[[str], str | None]) -> dict[str, str] | None:
        """The further headers of the answer to a preflight, whose status is 204; None if the request is not one.

        A preflight needs no key, and its answer is the same for all paths. `header` returns a header's value by name.
        """
        is_asked = method == "OPTIONS" and header("access-control-request-method") is not None
        if not is_asked or header("origin") not in self.origins:
            return None
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_SECONDS)}
        names = header("access-control-request-headers") or ""
        if _HEADER_NAMES.fullmatch(names):  # client libraries add headers of their own: allow all that the page wants
            headers["Access-Control-Allow-Headers"] = names
        return headers


def allow_origins(app: web.Application, origins: tuple[str, ...]) -> None:
    """Let pages of these origins, and no others, read the answers of `app`; without origins, nothing changes."""
    if not origins:
        return
    cors = Cors(origins)

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(cors.headers(request.headers.get("Origin")))

    @web.middleware
    async def preflight(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        headers = cors.preflight(request.method, request.headers.get)
        return (
            await handler(request) if headers is None else web.Response(status=204, headers=headers | {"Server": NAME})
        )

    app.middlewares.insert(0, preflight)
    app.on_response_prepare.append(tell)
