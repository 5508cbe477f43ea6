"""Which client a request comes from, if a reverse proxy hands it on.

    client ──▶ proxy 1 ──▶ proxy 2 ──▶ here:  X-Forwarded-For: what the client wrote, client, proxy 1

Everyone may write such headers, so only what a trusted proxy (`--trusted-proxies`) has added is believed: the list is
read from its end, and the client is the first address that is no trusted proxy's. `Forwarded` (RFC 7239) is read in the
same way. A proxy that writes one of the two passes on the other one as the client wrote it; if both come and name
different clients, neither is believed, and the client is the proxy.

The PROXY protocol tells the same about a whole connection, in its first bytes, for proxies that do not read HTTP
(https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt). These bytes come before TLS, which the event loop removes
before any of our code sees a byte, so the protocol is understood on connections without TLS only.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import structlog

from penstock.config.networks import Address, read_address

log = structlog.get_logger()

MAX_HOPS = 32
"""Proxies that are followed back; what is farther away than that is not read."""

_FOR = re.compile(r"(?:^|;)\s*for=([^;]*)", re.IGNORECASE)
_WITH_PORT = re.compile(r"\[([^]]*)\](?::\d+)?|([\d.]+):\d+")


class TrustedProxies:
    """The proxies of one listener."""

    def __init__(self, networks: Sequence[str]) -> None:
        """`networks` are addresses and networks as the options give them."""
        self._networks = tuple(map(ipaddress.ip_network, networks))
        self._has_warned = False

    def trusts(self, peer: str) -> bool:
        """Whether an address is a trusted proxy's."""
        address = read_address(peer) if self._networks else None
        return address is not None and self._holds(address)

    def client(self, peer: str, headers: Mapping[str, Sequence[str]]) -> str:
        """Return the address of a request's client.

        Args:
            peer: the address that has connected, or that the PROXY protocol has named.
            headers: of the request, by their names in lower case.
        """
        forwarded, listed = headers.get("forwarded"), headers.get("x-forwarded-for")
        if forwarded is None and listed is None:
            return peer
        if not self.trusts(peer):
            self._warn("a proxy's headers are ignored: who sends them is not among --trusted-proxies", peer)
            return peer
        said = set()
        if forwarded is not None:
            said.add(self._first_untrusted(peer, map(_node, _from_the_end(forwarded))))
        if listed is not None:
            said.add(self._first_untrusted(peer, _from_the_end(listed)))
        if len(said) > 1:
            self._warn("a proxy's headers are ignored: Forwarded and X-Forwarded-For name different clients", peer)
            return peer
        return said.pop()

    def _first_untrusted(self, peer: str, hops: Iterator[str]) -> str:
        client = peer
        for hop in islice(hops, MAX_HOPS):
            found = _WITH_PORT.fullmatch(hop)
            address = read_address(hop if found is None else found[1] or found[2])
            if address is None:  # such as "unknown": the last address that is known stands for the client
                break
            client = str(address)
            if not self._holds(address):
                break
        return client

    def _holds(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def _warn(self, what: str, peer: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(what, address=peer)


def _from_the_end(lines: Sequence[str]) -> Iterator[str]:
    """The elements of a header's lists, the last one first. Quotation marks do not protect commas: clients' could."""
    for line in reversed(lines):
        for element in reversed(line.rsplit(",", MAX_HOPS)):
            yield element.strip()


def _node(element: str) -> str:
    """The client's address in an element of `Forwarded`; empty if it does not name exactly one."""
    found = _FOR.findall(element)
    return found[0].strip().strip('"') if len(found) == 1 else ""


# --- the PROXY protocol ---------------------------------------------------------------------------

_SIGNATURES = (b"PROXY TCP4 ", b"PROXY TCP6 ", b"PROXY UNKNOWN", b"\r\n\r\n\0\r\nQUIT\n")
_V1_BYTES = 107  # the longest line
_V2_HEAD, _V2_BYTES = 16, 2048  # before the addresses; and the most in all
_V2_SIZES = {0x11: 4, 0x21: 16}  # bytes of an address, by family: TCP over IPv4 and over IPv6


class PreambleError(Exception):
    """A connection begins with the PROXY protocol, but not with a valid form of it."""


class Preamble(NamedTuple):
    """What stands before the first request of a connection."""

    client: str  # address; empty: the proxy's own connection, such as a health check
    num_bytes: int


def may_begin_preamble(data: bytes) -> bool:
    """Whether these first bytes of a connection are the PROXY protocol's, or may yet become so."""
    return any(data.startswith(signature) or signature.startswith(data) for signature in _SIGNATURES)


def read_preamble(data: bytes) -> Preamble | None:
    """Read the PROXY protocol's bytes, for which `may_begin_preamble` holds; None if more must come.

    Raises:
        PreambleError: they are invalid; the message says why.
    """
    try:
        return _read_line(data) if data.startswith(b"P") else _read_binary(data)
    except ValueError:
        raise PreambleError("the addresses are not valid") from None


def _read_line(data: bytes) -> Preamble | None:
    line, is_whole, _ = data[:_V1_BYTES].partition(b"\r\n")
    if not is_whole:
        if len(data) >= _V1_BYTES:
            raise PreambleError("the line has no end")
        return None
    fields = line.decode("ascii").split(" ")
    if fields[1] == "UNKNOWN":
        return Preamble("", len(line) + 2)
    if len(fields) != 6:
        raise PreambleError("the line must have two addresses and two ports")
    client = ipaddress.IPv4Address(fields[2]) if fields[1] == "TCP4" else ipaddress.IPv6Address(fields[2])
    return Preamble(str(read_address(str(client))), len(line) + 2)


def _read_binary(data: bytes) -> Preamble | None:
    if len(data) < _V2_HEAD:
        return None
    command, family, length = data[12], data[13], int.from_bytes(data[14:_V2_HEAD])
    num_bytes, size = _V2_HEAD + length, _V2_SIZES.get(family, 0)
    if command not in (0x20, 0x21) or num_bytes > _V2_BYTES or (command == 0x21 and length < 2 * size):
        raise PreambleError("its version, command or length is unknown")
    if len(data) < num_bytes:
        return None
    if command == 0x20 or not size:
        return Preamble("", num_bytes)
    client = ipaddress.ip_address(data[_V2_HEAD : _V2_HEAD + size])
    return Preamble(str(read_address(str(client))), num_bytes)
