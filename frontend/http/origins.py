"""Whom a request is addressed to, and which page in a browser it comes from: what keeps pages from driving a server
that listens on its own machine alone.

A page may give its own name the address 127.0.0.1 (DNS rebinding) and then asks with that name as Host, as if the
server were its own. So a server without keys answers to localhost, to addresses, and to the names that --allowed-hosts
gives, if it listens on a loopback address or if that option is given. Any page may also send simple requests without
asking: they carry its Origin, and routes that change something for nothing but a POST refuse one that is not allowed.
"""

import ipaddress
import re
from functools import lru_cache

from aiohttp import HttpVersion11, web

from penstock.core.config.listening import is_loopback
from penstock.core.config.options import FrontendOptions
from penstock.frontend.errors import HostNotAllowed, MalformedRequest, OriginNotAllowed, UnsupportedTransfer

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


class Origins:
    """The rules of one listener."""

    def __init__(self, host: str, options: FrontendOptions) -> None:
        """`host` is the address that it listens on."""
        self._guards_host = is_loopback(host) or bool(options.allowed_hosts)
        self._allowed = frozenset(name.lower().rstrip(".") for name in (host, *options.allowed_hosts))
        self._pages = frozenset(options.cors_origins)

    def check(self, request: web.Request, *, has_keys: bool, is_open: bool, is_action: bool) -> None:
        """Raise unless the request's head is one to answer.

        Args:
            request: only its head is looked at.
            has_keys: requests need API keys here.
            is_open: the route tells nothing but a word, to whoever asks.
            is_action: the route changes something, and no body says that it is meant.

        Raises:
            MalformedRequest: its Host is none, or its body has a coding that its version of HTTP does not know.
            UnsupportedTransfer: the body is coded in a way that is not supported.
            HostNotAllowed: the request is for somebody else.
            OriginNotAllowed: a page in a browser sends it that may not.
        """
        _check_framing(request)
        host = request.headers.get("Host")
        if host is None:
            return  # HTTP/1.0, which no browser speaks: aiohttp refuses later versions without one
        name = _name_of(host)
        if not name:
            raise MalformedRequest(f"the header Host must be a name or an address, and a port, got {host[:64]!r}")
        if self._guards_host and not has_keys and not is_open and not self._is_allowed(name):
            raise HostNotAllowed(
                f"the host {name[:64]!r} is not allowed: without API keys this server answers to localhost and to "
                "addresses; --allowed-hosts adds names"
            )
        origin = request.headers.get("Origin") if is_action else None
        if not (origin is None or origin in self._pages or origin.partition("://")[2].lower() == host.lower()):
            raise OriginNotAllowed(f"the origin {origin[:64]!r} is not allowed; --cors-origins adds origins")

    def _is_allowed(self, name: str) -> bool:
        return name in self._allowed or "*" in self._allowed or _is_safe(name)


def _check_framing(request: web.Request) -> None:
    coding = request.headers.get("Transfer-Encoding")
    if coding is None:
        return
    if coding.strip().lower() != "chunked":
        raise UnsupportedTransfer(f"Transfer-Encoding must be chunked, got {coding[:64]!r}")
    if request.version < HttpVersion11:
        raise MalformedRequest("HTTP/1.0 has no Transfer-Encoding")


@lru_cache(256)
def _name_of(host: str) -> str:
    """The name, or address, of a Host header, in lower case; empty if it is none."""
    found = _HOST.fullmatch(host)
    return found[1].lower().rstrip(".") if found is not None else ""


@lru_cache(256)
def _is_safe(name: str) -> bool:
    """No page can come to this machine under it: it needs no name server, or means this machine everywhere."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
