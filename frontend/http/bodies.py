"""Bodies of requests, read with bounds: on each, and on what all of them that are still coming in hold together."""

from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from penstock.frontend.errors import BodyTooLarge, MalformedBody, TooManyValues, Unavailable, UnsupportedMediaType
from penstock.frontend.exchange.replies import JSON
from penstock.frontend.json_size import JsonSize, TooManyValuesError

SMALL_BODY_BYTES = 4096
"""What so few bytes say is soon read, whatever it is: most bodies need not be measured."""

MAX_HELD_BODIES = 32
"""Bodies of the greatest size that may be held half-read: a client may take its time with each last byte."""

_RETRY_SECONDS = 5


class BodyReader:
    """Reads the bodies of one process."""

    def __init__(self, max_bytes: Callable[[], int]) -> None:
        """`max_bytes` tells the most that one body may have now."""
        self._max_bytes = max_bytes
        self._num_held = 0  # bytes of bodies that are not whole yet

    async def read(self, request: web.Request) -> bytes:
        """A JSON request's body, which nothing but the caller refers to.

        Raises:
            UnsupportedMediaType: it is something else, or compressed.
            BodyTooLarge: it has too many bytes.
            TooManyValues: it would be too many objects, or too deep ones.
            MalformedBody: its transfer is no HTTP.
            Unavailable: too much is held for others already.
        """
        _check_type(request)
        max_bytes = self._max_bytes()
        if request.content_length is not None and request.content_length > max_bytes:
            raise _too_large(max_bytes, str(request.content_length))
        pieces: list[bytes] = []
        num_bytes = 0
        is_small = request.content_length is not None and request.content_length <= SMALL_BODY_BYTES
        size = JsonSize()
        try:
            while piece := await request.content.readany():
                pieces.append(piece)
                num_bytes += len(piece)
                self._num_held += len(piece)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes, "more")
                if self._num_held > MAX_HELD_BODIES * max_bytes:
                    raise Unavailable("too many large bodies are being received", retry_after=_RETRY_SECONDS)
                if not is_small:
                    size.feed(piece)
        except TooManyValuesError as error:
            raise TooManyValues(f"the body is too large: {error}") from None
        except (HttpProcessingError, ValueError):
            raise MalformedBody("the body is not valid HTTP: its chunks, or what follows them") from None
        finally:
            self._num_held -= num_bytes
        return b"".join(pieces)


def _too_large(max_bytes: int, got: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body may have {max_bytes} bytes at most, got {got}")


def _check_type(request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise UnsupportedMediaType("compressed bodies are not accepted")
    if request.content_type != JSON:
        raise UnsupportedMediaType(f"Content-Type must be application/json, got {request.content_type[:128]!r}")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType(f"the charset must be utf-8, got {(request.charset or '')[:64]!r}")
