"""Finds a client's images: the parts of messages that contain them, in the APIs' various forms."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.frontend.errors import InvalidImage, InvalidParameter, UnsupportedParameter

KINDS = ("image_url", "input_image")
"""Types of image parts: in chats, and in responses."""

_DETAILS = ("auto", "low", "high", "original")
_DATA = re.compile(r"data:([^;,]{0,128})((?:;[^;,]{0,64}){0,4}),", re.IGNORECASE)
_BLANKS = re.compile(r"[ \t\r\n]")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits for the images of requests."""

    max_images: int  # in a request
    max_bytes: int = 20 << 20  # of one image, as it is sent or fetched: more than cameras and other services send
    max_pixels: int = 64 << 20  # before the model's processor shrinks it: 200 MB while it is decoded
    seconds: float = 10.0  # for fetching an image, redirects included


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One image as a client sends it."""

    field: str  # its place in the request
    address: str  # http(s); empty: `data` has it
    data: str  # base64
    is_low: bool = False  # shrink it

    def refused(self, why: str) -> InvalidImage:
        """The error that says why the image is not read."""
        return InvalidImage(f"{self.field}: the image is not read: {why}", param=self.field)


def image_of_part(field: str, part: Mapping[str, Any], limits: ImageLimits) -> ImageSource:
    """The image of a part of type `image_url` or `input_image`.

    Raises:
        InvalidParameter: a field of the part has the wrong type.
        InvalidImage: the image is too large, or neither base64 nor an address.
        UnsupportedParameter: the image is an uploaded file.
    """
    given, detail = part.get("image_url"), part.get("detail")
    if given is None and part.get("file_id") is not None:
        raise UnsupportedParameter(f"{field}.file_id: images of uploaded files are not supported", param=field)
    field = f"{field}.image_url"
    if isinstance(given, dict):
        detail = given.get("detail") if detail is None else detail
        given, field = given.get("url"), f"{field}.url"
    if not isinstance(given, str):
        raise InvalidParameter(f"{field}: expected a text, an address or a data: URL", param=field)
    if detail is not None and detail not in _DETAILS:
        raise InvalidParameter(f"{field}: detail must be one of {', '.join(_DETAILS)}", param=field)
    return image_at(field, given, limits, is_low=detail == "low")


def image_at(field: str, address: str, limits: ImageLimits, *, is_low: bool = False) -> ImageSource:
    """The image at an address, or in a data: URL.

    Raises:
        InvalidImage: the image is too large, or not in base64.
    """
    if address[:5].lower() != "data:":
        return ImageSource(field, address, "", is_low)
    found = _DATA.match(address[:512])
    source = ImageSource(field, "", "" if found is None else address[found.end() :], is_low)
    if found is None or ";base64" not in found[2].lower():
        raise source.refused("a data: URL must be data:TYPE;base64,DATA")
    kind = found[1].strip().lower()
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise source.refused(f"its type is {kind[:64]!r}, which is no image")
    return checked_size(source, limits)


def checked_size(source: ImageSource, limits: ImageLimits) -> ImageSource:
    """The source, if its base64 is not too long.

    Raises:
        InvalidImage: it is too long.
    """
    if len(source.data) * 3 // 4 > limits.max_bytes:
        raise source.refused(f"it has more than {limits.max_bytes} bytes")
    return source


def without_blanks(data: str) -> str:
    """Base64 with white space removed: some encoders write line breaks."""
    return _BLANKS.sub("", data) if _BLANKS.search(data) else data
