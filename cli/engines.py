"""A client of the server's administration routes, for commands."""

import argparse
import ipaddress
import json
import os
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from penstock.config.api_keys import CLIENT_KEY_HELP, client_key

DEFAULT_URL = "http://127.0.0.1:8000"


class RefusedError(Exception):
    """The server has refused an order; the message says why."""

    def __init__(self, sentence: str, *, wants_key: bool = False) -> None:
        super().__init__(sentence)
        self.wants_key = wants_key


def add_server_options(parser: argparse.ArgumentParser, what: str = "of the server") -> None:
    """Add the options that say which server a command speaks to, and with which key."""
    parser.add_argument("--url", type=_url, default=DEFAULT_URL, metavar="URL", help=f"{what} (default: %(default)s)")
    parser.add_argument("--api-key", default=client_key(), metavar="KEY", help=CLIENT_KEY_HELP)


def _url(text: str) -> str:
    """A URL; HOST:PORT means http."""
    return text if "://" in text else f"http://{text}"


def no_server(url: str, error: OSError) -> str:
    """What to say where nothing listens."""
    known = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror  # libraries say more
    reason = known or str(error)
    return f"no server answers at {url} ({reason}); `penstock serve` starts one, and --url gives another one's address"


class Server:
    """A server, by its routes."""

    def __init__(self, url: str, key: str, patience: float = 10.0) -> None:
        """`patience`: seconds to wait for an answer."""
        self._url = url.rstrip("/")
        self._patience = patience
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def engines(self) -> dict[str, dict[str, Any]]:
        """Return all engines by name."""
        return {each["id"]: each for each in self._ask("GET", "/engines")["data"]}

    def order(self, engine: str, what: str, body: dict[str, str] | None = None) -> None:
        """Make an engine `drain`, `undrain` or `restart`, or give it a `role`."""
        self._ask("POST", f"/engines/{engine}/{what}", body)

    def get(self, path: str) -> dict[str, Any]:
        """Return a route's JSON answer."""
        return self._ask("GET", path)

    def text(self, path: str) -> str:
        """Return the answer of a route that does not use JSON."""
        return self._send("GET", path).decode(errors="replace")

    def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        try:
            return dict(json.loads(self._send(method, path, body)))
        except (ValueError, TypeError) as error:
            raise RefusedError(f"{self._url} does not answer as expected: {error}") from None

    def _send(self, method: str, path: str, body: dict[str, str] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with _opener(self._url).open(request, timeout=self._patience) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise RefusedError(_reason(error.read(), str(error)), wants_key=error.code == 401) from None
        except urllib.error.URLError as error:
            reason = error.reason if isinstance(error.reason, OSError) else error
            raise RefusedError(no_server(self._url, reason)) from None
        except (OSError, ValueError, HTTPException) as error:
            raise RefusedError(f"{self._url} does not answer: {error}") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """What opens a URL: for this machine's servers no proxy of the environment, which would look on its own machine."""
    host = urlsplit(url).hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def _reason(body: bytes, otherwise: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise
