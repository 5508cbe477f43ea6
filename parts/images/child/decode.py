"""Decodes a file's bytes into an image, in a process that may crash.

Whatever the head of a file tells is checked before a pixel is decoded. Images are loaded as in transformers (turned as
the EXIF data says, transparent parts on white), with two exceptions: 16-bit grey values are scaled to 8 bits, while
Pillow would clip all above 255; and animations are refused, because a model would see only one frame.
"""

import io

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats of OpenAI's API; each further decoder would be one more to attack."""

LOW_DETAIL = 512
"""With `detail: low`, an image is shrunk until neither side is longer than this."""

_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")
_OTHER_KINDS = (
    (b"<svg", "an SVG drawing"), (b"<?xml", "XML, perhaps an SVG drawing"), (b"<!doctype", "an HTML page"),
    (b"<html", "an HTML page"), (b"%pdf", "a PDF document"), (b"{", "JSON"), (b"bm", "a BMP image"),
    (b"ii*\0", "a TIFF image"), (b"mm\0*", "a TIFF image"), (b"8bps", "a Photoshop file"),
    (b"pk\x03\x04", "a ZIP file"), (b"\x1f\x8b", "compressed with gzip"), (b"\0\0\1\0", "an icon"),
)  # fmt: skip
_IN_BOXES = {b"avif": "an AVIF image", b"heic": "a HEIC image", b"heix": "a HEIC image", b"mif1": "a HEIF image"}

Image.MAX_IMAGE_PIXELS = None  # checked here instead, with the server's own limit


class ImageRefusedError(ValueError):
    """A file is not an image that the model can be shown; the message ends a sentence that begins elsewhere."""


def decode(data: bytes, *, max_pixels: int, is_low: bool = False) -> Image.Image:
    """The image in a file, in RGB; `is_low`: shrunk as `detail: low` asks.

    Raises:
        ImageRefusedError: the file is not an image, or too large, or damaged.
    """
    if not data:
        raise ImageRefusedError("it is empty")
    _check_size(*_webp_size(data), max_pixels)  # Pillow allocates a WebP's pixels when it opens the file
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise errors of any type
        if data.startswith(_STARTS):
            raise ImageRefusedError(f"it is damaged: {_said(error)}") from None
        kind = _kind(data) or "not an image"
        raise ImageRefusedError(f"it is {kind}: PNG, JPEG, WebP and GIF are read") from None
    _check_size(*image.size, max_pixels)
    try:
        if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO: a JPEG with previews
            raise ImageRefusedError("it is animated; only still images are read")
        image.load()
        whole = _in_rgb(ImageOps.exif_transpose(image))
    except (ImageRefusedError, MemoryError):
        raise
    except Exception as error:
        raise ImageRefusedError(f"it is damaged: {_said(error)}") from None
    if is_low:
        whole.thumbnail((LOW_DETAIL, LOW_DETAIL), Image.Resampling.BICUBIC)
    return whole


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageRefusedError(f"it has {width} x {height} pixels; at most {max_pixels} are allowed")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height that the head of a WebP file claims; zeros for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 0, 0
    match data[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits, in either byte order
        values = np.asarray(image).astype(np.int64) // 257
        image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _kind(data: bytes) -> str | None:
    """What a file seems to be, if that is known and not a supported image."""
    head = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if data[4:8] == b"ftyp":
        return _IN_BOXES.get(data[8:12].lower(), "a video, or an image of another kind")
    return next((kind for start, kind in _OTHER_KINDS if head.startswith(start)), None)


def _said(error: Exception) -> str:
    """A decoder's message, without details that clients should not see."""
    said = str(error).partition("\n")[0]
    if not said or any(sign in said for sign in ("/", "<", "cannot identify")):
        return "its head makes no sense"
    return said[:160]
