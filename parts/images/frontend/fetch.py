"""Fetches images at http(s) addresses: only from allowed hosts, and never from a private address.

A name is resolved once, and the connection goes to one of the addresses that were checked, so a name cannot point
elsewhere between check and use. A redirect is a new address with the same checks. The same parser (yarl, which aiohttp
uses) reads the address for the check and for the connection. URLs that parsers are known to disagree about are refused.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

MAX_REDIRECTS = 3
MAX_ADDRESS = 2048
_PORTS = {"http": 80, "https": 443}
_ODD = re.compile(r"[\x00-\x20\\\x7f-\uffff]")
"""Spaces, backslashes, control characters, and everything outside ASCII."""

_MOVED = frozenset((301, 302, 303, 307, 308))
_EMBEDDING = tuple(map(ipaddress.IPv6Network, ("64:ff9b::/96", "::ffff:0:0:0/96", "::/96")))
"""IPv6 networks whose last 32 bits are an IPv4 address, to which a gateway may translate them."""
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "penstock"}
"""No versions: an address that a client chose need not learn them."""

_LOCAL = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "3fff::/20", "fec0::/10"))
)
"""Networks that are not of the Internet, though older versions of Python say so; the second one has IPv4 addresses in
places that its gateway chooses, the last one has the addresses of sites before there were unique local ones."""

Resolve = Callable[[str, int], Awaitable[list[str]]]


class FetchRefusedError(ValueError):
    """An image may not be fetched, or could not be; the message is one sentence."""


class ImageFetcher:
    """Fetches images; lives in a running event loop until `close`."""

    def __init__(self, hosts: tuple[str, ...], *, max_bytes: int, seconds: float, max_connections: int = 16) -> None:
        """`hosts` are names, with a port if it is not the usual one; *.name means all subdomains of a name."""
        self._hosts = tuple(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._turns = asyncio.Semaphore(max_connections)
        self.resolve: Resolve = resolve
        self.is_public: Callable[[str], bool] = is_public

    def check(self, address: str) -> URL:
        """The address, if images may be fetched from it.

        Raises:
            FetchRefusedError: images may not be fetched from it.
        """
        if not self._hosts:
            raise FetchRefusedError("this server does not fetch images; send them as data: URLs in base64")
        if len(address) > MAX_ADDRESS:
            raise FetchRefusedError(f"the address has {len(address)} characters; at most {MAX_ADDRESS} are allowed")
        if _ODD.search(address):
            raise FetchRefusedError("the address has blanks, backslashes or characters beyond ASCII")
        try:
            url = URL(address)
            port = url.port
        except ValueError:
            raise FetchRefusedError("this is not a valid address") from None
        if url.scheme not in _PORTS:
            raise FetchRefusedError("only http, https and data addresses are supported")
        if url.user is not None or url.password is not None or "@" in url.raw_authority:
            raise FetchRefusedError("the address must not have a user or a password")
        host = (url.raw_host or "").lower().rstrip(".")
        named = host if port == _PORTS[url.scheme] else f"{host}:{port}"
        if not host or not any(_matches(named, allowed) for allowed in self._hosts):
            raise FetchRefusedError(f"this server does not fetch images from {named[:128]!r} (--image-hosts)")
        return url

    async def fetch(self, address: str) -> bytes:
        """The bytes at an address.

        Raises:
            FetchRefusedError: fetching is not allowed, or fails, or there are too many bytes, or they come too slowly.
        """
        self.check(address)
        try:
            async with asyncio.timeout(self._seconds), self._turns:
                return await self._follow(address)
        except TimeoutError:
            raise FetchRefusedError(f"the image did not come within {self._seconds:g} seconds") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, FetchRefusedError):
                raise
            raise FetchRefusedError("the image cannot be fetched: its host does not answer as expected") from None

    async def _follow(self, address: str) -> bytes:
        url = self.check(address)
        for _ in range(1 + MAX_REDIRECTS):
            addresses = await self._addresses(url)
            connector = aiohttp.TCPConnector(resolver=_Known(addresses), use_dns_cache=False, force_close=True, limit=1)
            async with (
                aiohttp.ClientSession(
                    connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
                ) as session,
                session.get(url, allow_redirects=False, headers=_HEADERS) as answer,
            ):
                if answer.status not in _MOVED:
                    return await self._body(answer)
                url = self.check(_target(url, answer.headers.get("Location", "")))
        raise FetchRefusedError(f"the address redirects more than {MAX_REDIRECTS} times")

    async def _addresses(self, url: URL) -> list[str]:
        """The IP addresses of a URL's host, all of which are public."""
        host = url.raw_host or ""
        try:
            found = [host] if _is_literal(host) else await self.resolve(host, url.port or 0)
        except OSError:
            raise FetchRefusedError(f"there is no host {host[:128]!r}") from None
        if not found or not all(map(self.is_public, found)):
            raise FetchRefusedError(f"{host[:128]!r} has a private address, from which nothing is fetched")
        return found

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.status != 200:
            raise FetchRefusedError(f"the image cannot be fetched: its host answers with status {answer.status}")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise FetchRefusedError("the host sent a compressed body")
        too_large = FetchRefusedError(f"the image has more than {self._max_bytes} bytes")
        if (answer.content_length or 0) > self._max_bytes:
            raise too_large
        pieces, size = [], 0
        async for piece in answer.content.iter_any():
            size += len(piece)
            if size > self._max_bytes:
                raise too_large
            pieces.append(piece)
        return b"".join(pieces)


class _Known(AbstractResolver):
    """A resolver that answers with addresses that were resolved before."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=address, port=port, proto=socket.IPPROTO_TCP, flags=socket.AI_NUMERICHOST,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            )
            for address in self._addresses
        ]  # fmt: skip

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


async def resolve(host: str, port: int) -> list[str]:
    """The IP addresses of a name."""
    found: list[Any] = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def is_public(address: str) -> bool:
    """Whether an address is public: not this machine's, not of a private network, and not reserved."""
    found = ipaddress.ip_address(address)
    if any(found in network for network in _LOCAL):
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and any(found in network for network in _EMBEDDING):
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _matches(named: str, allowed: str) -> bool:
    return named.endswith(allowed[1:]) if allowed.startswith("*.") else named == allowed


def _target(url: URL, location: str) -> str:
    """Where a redirect leads."""
    if not location or _ODD.search(location):
        raise FetchRefusedError("the address redirects to one that is not valid")
    return str(url.join(URL(location)))
