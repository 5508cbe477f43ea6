"""Reads a form (multipart/form-data, RFC 7578) piece by piece: a file in it is never held as a whole.

body ──▶ [ delimiter | head | content of a part ] [ delimiter | head | content ] ... [ delimiter -- ]
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from penstock.frontend.errors import MalformedBody

_MAX_HEAD_BYTES = 8192
_MAX_PARTS = 32
_MAX_BOUNDARY = 70  # characters; RFC 2046


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a form; read its content before the next part."""

    name: str
    filename: str | None  # None: not a file
    pieces: AsyncIterator[bytes]

    async def text(self, max_bytes: int) -> str:
        """The content of a short field.

        Raises:
            MalformedBody: the content is longer, or not UTF-8.
        """
        content = b""
        async for piece in self.pieces:
            content += piece
            if len(content) > max_bytes:
                raise MalformedBody(f"the field {self.name[:64]!r} may have at most {max_bytes} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise MalformedBody(f"the field {self.name[:64]!r} is not UTF-8") from None


class FormReader:
    """Reads one form."""

    def __init__(self, content_type: str, next_piece: Callable[[], Awaitable[bytes]]) -> None:
        """`next_piece` returns the next bytes of the body; empty at its end.

        Raises:
            MalformedBody: the content type names no boundary, or cannot be read.
        """
        boundary = _parameter(content_type, "boundary") or ""
        if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
            raise MalformedBody(f"Content-Type must name a boundary of at most {_MAX_BOUNDARY} characters")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._next_piece = next_piece
        self._held = bytearray(b"\r\n")  # so that the first delimiter looks like all others
        self._is_content = True  # the next bytes belong to a part, or come before the first one

    async def parts(self) -> AsyncIterator[Part]:
        """All parts, in order.

        Raises:
            MalformedBody: the body is not a form, or has too many parts.
        """
        num_parts = 0
        while True:
            async for _ in self._content():  # skip what was not read
                pass
            ending = await self._take(2)
            if ending == b"--":
                while await self._more():  # bytes after the form have no meaning
                    self._held.clear()
                return
            num_parts += 1
            if num_parts > _MAX_PARTS:
                raise MalformedBody(f"the form may have at most {_MAX_PARTS} parts")
            head = ending + await self._head()
            name, filename = _read_head(head)
            await asyncio.sleep(0)  # a head may take milliseconds, and all of them may be there at once
            self._is_content = True
            yield Part(name, filename, self._content())

    async def _content(self) -> AsyncIterator[bytes]:
        held, delimiter = self._held, self._delimiter
        while self._is_content:
            at = held.find(delimiter)
            end = at if at >= 0 else max(0, len(held) - len(delimiter) + 1)
            piece = bytes(held[:end])
            del held[: end + (len(delimiter) if at >= 0 else 0)]
            self._is_content = at < 0
            if piece:
                yield piece
            if self._is_content and not await self._more():
                raise MalformedBody("the multipart body is truncated")

    async def _head(self) -> bytes:
        """A part's head: from the end of the delimiter's line to the empty line."""
        while (at := self._held.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES + 4)) < 0:
            if len(self._held) > _MAX_HEAD_BYTES:
                raise MalformedBody(f"the head of a part may have at most {_MAX_HEAD_BYTES} bytes")
            if not await self._more():
                raise MalformedBody("the multipart body is truncated")
        return await self._take(at + 4)

    async def _take(self, num_bytes: int) -> bytes:
        while len(self._held) < num_bytes:
            if not await self._more():
                raise MalformedBody("the multipart body is truncated")
        taken = bytes(self._held[:num_bytes])
        del self._held[:num_bytes]
        return taken

    async def _more(self) -> bool:
        piece = await self._next_piece()
        self._held += piece
        return bool(piece)


def _read_head(head: bytes) -> tuple[str, str | None]:
    """The name of a part, and the name of its file."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            field = _parameter(value, "name")
            if value.partition(";")[0].strip().lower() == "form-data" and field is not None:
                return field, _parameter(value, "filename")
    raise MalformedBody("each part of the form needs a line `Content-Disposition: form-data; name=...`")


_PARAMETER = re.compile(r';[ \t]*([^=;"\s]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;]*)', re.DOTALL)
_ESCAPED = re.compile(r'\\(["\\])')


def _parameter(value: str, name: str) -> str | None:
    """One parameter of a header, in a time that grows with the header's length only.

    Raises:
        MalformedBody: it is in pieces (RFC 2231), which no form has, or names no charset.
    """
    found: str | None = None
    for match in _PARAMETER.finditer(value.replace("\r", " ").replace("\n", " ")):
        key, text = match[1].lower(), match[2].strip()
        if len(text) >= 2 and text[0] == text[-1] == '"':
            text = _ESCAPED.sub(r"\1", text[1:-1])
        if key == name and found is None:
            found = text
        elif key.startswith(f"{name}*"):
            if key != f"{name}*" or not text.partition("'")[0].isprintable():
                raise MalformedBody(f"the parameters in {value.strip()[:128]!r} cannot be read")
            found = _decoded(text)
    return found


def _decoded(text: str) -> str:
    """A text that names its charset (RFC 8187); as it is if that is missing, unknown or wrong."""
    charset, *rest = text.split("'", 2)
    if len(rest) != 2:
        return text
    if charset.lower() not in ("", "utf-8", "iso-8859-1"):  # Python keeps every other name that it is asked for
        return rest[1]
    try:
        return unquote_to_bytes(rest[1]).decode(charset or "utf-8")
    except (LookupError, ValueError):
        return rest[1]
