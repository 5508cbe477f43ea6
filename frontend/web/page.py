"""The page's files, read when they are first requested, and sent with a policy that allows nothing else.

    GET /  (Accept: text/html)  index.html        GET /ui/...  what it refers to

They contain no secret: if there are API keys, the page asks its user for one. All data comes over the API that all
clients use.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from penstock.config.listening import is_loopback
from penstock.config.options import FrontendOptions
from penstock.frontend.api.operations import index
from penstock.frontend.api.service import Service
from penstock.frontend.errors import RouteNotFound
from penstock.frontend.exchange.replies import Reply, RequestRecord

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
OLLAMA_PORT = 11434
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Cache-Control": "no-cache",  # browsers ask each time, and get a 304 while it has not changed
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class File(NamedTuple):
    """One of the page's files."""

    content: bytes
    content_type: str
    tag: str


@cache
def files() -> dict[str, File]:
    """All files, by their paths within the folder."""
    found = {}
    for path in FOLDER.rglob("*"):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            found[path.relative_to(FOLDER).as_posix()] = File(content, _TYPES[path.suffix], tag)
    return found


def is_served(options: FrontendOptions) -> bool:
    """Whether the page is served: as the options say, else only if no other machine can reach it."""
    return is_loopback(options.host) if options.web_ui == "auto" else options.web_ui == "on"


async def page(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /: the page for a browser, Ollama's own words for its clients, a list of routes for others."""
    accepted = ",".join(record.headers.get("accept", ()))
    if "text/html" not in accepted and _takes_for_ollama(record, accepted):
        return Reply(b"Ollama is running", 200, "text/plain; charset=utf-8", {"Vary": "Accept, User-Agent"})
    if not ("text/html" in accepted and is_served(service.config.frontend)):
        return await index(service, record, body)
    reply = _reply(files()["index.html"], record)
    reply.headers["Vary"] = "Accept"
    return reply


def _takes_for_ollama(record: RequestRecord, accepted: str) -> bool:
    """Whether a client looks for Ollama: by its name, or by the port where it asks for anything but JSON."""
    if any("ollama" in value.lower() for value in record.headers.get("user-agent", ())):
        return True
    is_its_port = any(value.endswith(f":{OLLAMA_PORT}") for value in record.headers.get("host", ()))
    return "application/json" not in accepted and (is_its_port or accepted.startswith("text/plain"))


async def file(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /ui/{id}

    Raises:
        RouteNotFound: there is no such file, or no page.
    """
    found = files().get(record.argument) if is_served(service.config.frontend) else None
    if found is None:
        raise RouteNotFound(f"there is nothing at {'/ui/' + record.argument[:256]!r}")
    return _reply(found, record)


def _reply(file: File, record: RequestRecord) -> Reply:
    headers = HEADERS | {"ETag": file.tag}
    if any(file.tag in value for value in record.headers.get("if-none-match", ())):
        return Reply(b"", 304, file.content_type, headers)
    return Reply(file.content, 200, file.content_type, headers)
