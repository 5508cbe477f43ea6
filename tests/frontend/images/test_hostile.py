"""Hostile images and addresses are refused with one sentence each; nothing that is private is asked."""

import base64
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from penstock.parts.images.frontend.fetch import is_public
from penstock.parts.images.frontend.part import Images
from tests.frontend.http_client import chat, chat_text, events, post
from tests.frontend.images.conftest import ImageHost
from tests.frontend.live_server import LiveServer
from tests.parts.images.image_models import data_url, encoded, noise

GOES_ON = "This is told from beginning to end. " * 20
PNG = b"\x89PNG\r\n\x1a\n"


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    """A PNG whose head says what it likes."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return PNG + head + b"".join(chunks) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    return encoded(noise(32, 32), kind, save_all=True, append_images=[noise(32, 32, 1)])


def jpeg(width: int, height: int) -> bytes:
    """A JPEG whose head says another size."""
    file = bytearray(encoded(noise(32, 32), "JPEG"))
    at = file.index(b"\xff\xc0")
    file[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(file)


WHOLE_PNG, WHOLE_JPEG = encoded(noise(90, 60)), encoded(noise(90, 60), "JPEG")

HOSTILE_FILES: dict[str, tuple[bytes, str]] = {
    "a head that claims 50,000 x 50,000": (png(50_000, 50_000), "50000 x 50000 pixels"),
    "a bomb of a few bytes": (encoded(Image.new("1", (9000, 9000))), "9000 x 9000 pixels"),
    "a JPEG that claims 65,000 x 65,000": (jpeg(65_000, 65_000), "65000 x 65000 pixels"),
    "a WebP too large": (encoded(Image.new("RGB", (3000, 3000)), "WEBP"), "3000 x 3000 pixels"),
    "no pixels at all": (png(0, 0), "damaged"),
    "a text that unpacks to 200 MB": (
        png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200 << 20), 9)), pixels=bytes(72)), "damaged",
    ),
    "half a PNG": (encoded(noise(300, 300))[:9000], "damaged"),
    "half a JPEG": (WHOLE_JPEG[: len(WHOLE_JPEG) // 2], "damaged"),
    "a PNG's first bytes": (PNG + bytes(64), "it is"),
    "an animated GIF": (animated("GIF"), "animated"),
    "an animated PNG": (animated("PNG"), "animated"),
    "an animated WebP": (animated("WEBP"), "animated"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://10.0.0.7/"/></svg>', "SVG"),
    "SVG after an XML head": (b'<?xml version="1.0"?><svg/>', "SVG"),
    "HTML": (b"<!DOCTYPE html><script>alert(1)</script>", "HTML"),
    "a PDF": (b"%PDF-1.7 ...", "PDF"),
    "a TIFF": (encoded(noise(9, 9), "TIFF"), "TIFF"),
    "a BMP": (encoded(noise(9, 9), "BMP"), "BMP"),
    "a video": (b"\0\0\0\x20ftypisom" + bytes(64), "video"),
    "an AVIF": (b"\0\0\0\x20ftypavif" + bytes(64), "AVIF"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),
    "noise": (bytes(range(256)) * 8, "not an image"),
    "nothing": (b"", "empty"),
    "a line": (encoded(noise(4000, 2)), "4000 x 2 pixels"),
    "too many bytes": (encoded(noise(700, 700)), "more than 1048576 bytes"),
}  # fmt: skip


def asked(live: LiveServer, *urls: Any, **fields: Any) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return post(live, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})


def check_refused(answer: Any, why: str) -> None:
    assert answer.status == 400, answer.text
    error = answer.json()["error"]
    assert why in error["message"], error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_image", "invalid_value")
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "\n" not in error["message"]
    assert len(error["message"]) < 320
    for secret in ("/dev/shm", "Traceback", "penstock-shared", " 0x", ".py"):
        assert secret not in error["message"]


def check_serves(live: LiveServer) -> None:
    """The processes go on, and have nothing left of what was refused."""
    images = live.server.service.parts.get(Images)
    assert images is not None
    live.says("A picture.")
    answer = asked(live, data_url(WHOLE_PNG))
    assert answer.json()["choices"][0]["message"]["content"] == "A picture."
    entries = images.reader._entries
    live.wait_until(lambda: not any(entry.num_holders for entry in entries.values()))
    kept = {entry.task.result().pixels.segment for entry in entries.values()}
    files, names = images.reader._files_here, {"owner", *(Path(name).name for name in kept)}
    live.wait_until(lambda: set(files._sizes) == kept)
    live.wait_until(lambda: {file.name for file in files._folder.iterdir()} == names)


def test_files(vision: LiveServer) -> None:
    """While another client's stream goes on, too."""
    vision.says(GOES_ON, delay=0.02)
    with ThreadPoolExecutor() as threads:
        streamed = threads.submit(chat, vision, stream=True)
        vision.wait_until(lambda: vision.scheduler.num_running == 1)
        _check_files(vision)
        assert chat_text(events(streamed.result())) == GOES_ON
    check_serves(vision)


def _check_files(vision: LiveServer) -> None:
    before: set[int] = set()
    for name, (file, why) in HOSTILE_FILES.items():
        answer = asked(vision, data_url(file))
        check_refused(answer, why)
        images = vision.server.service.parts.get(Images)
        assert images is not None
        now = set(images.reader._children.process_ids)
        assert before <= now, name  # no file has ended a process that reads them
        before = now


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,%%%%", "base64"),
        ("data:image/png;base64,iVBORw0KGgo", "base64"),
        ("data:image/png,rawbytes", "data: URL"),
        ("data:text/html;base64,PGh0bWw+", "'text/html'"),
        ("data:", "data: URL"),
        ("", "it is empty"),
        ("image.png", "only http, https and data"),
        ("file:///etc/passwd", "only http, https and data"),
        ("gopher://images.test/", "only http, https and data"),
        ("ftp://images.test/image.png", "only http, https and data"),
        ("//images.test/image.png", "only http, https and data"),
        ("http://", "does not fetch images from"),
        ("http://images.test:99999/", "valid address"),
        ("http://images.test\\@evil.test/", "backslashes"),
        ("http://images.test/\r\nHost: evil", "blanks"),
        ("http://\uff49mages.test/", "beyond ASCII"),
        ("http://images.test/" + "a" * 4000, "characters"),
        ("http://user:secret@images.test/", "user or a password"),
        ("http://images.test@evil.test/", "user or a password"),
        ("http://evil.test/image.png", "'evil.test'"),
        ("http://images.test.evil.test/", "'images.test.evil.test'"),
        ("http://cdn.test/", "'cdn.test'"),
        ("http://images.test:22/", "'images.test:22'"),
        ("http://localhost/", "'localhost'"),
        ("http://2130706433/", "does not fetch images from"),
        ("http://0x7f.1/", "does not fetch images from"),
        ("http://127.1/", "does not fetch images from"),
        ("http://[::ffff:127.0.0.1]/", "does not fetch images from"),
        ("http://169.254.169.254/latest/meta-data/", "does not fetch images from"),
        ("http://nowhere.cdn.test/", "no host"),
    ],
)
def test_addresses(vision: LiveServer, host: ImageHost, url: str, why: str) -> None:
    host.asked.clear()
    check_refused(asked(vision, url), why)
    assert host.asked == []


@pytest.mark.parametrize("name", ["private.test", "mapped.test", "mixed.test", "metadata.test", "translated.test"])
def test_names_of_private_addresses(vision: LiveServer, host: ImageHost, name: str) -> None:
    host.asked.clear()
    check_refused(asked(vision, f"http://{name}:{host.port}/image.png"), "private address")
    assert host.asked == []


def test_which_addresses_are_public() -> None:
    for address in ("8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::"):
        assert is_public(address), address
    private = (
        "127.0.0.1",
        "10.0.0.1",
        "100.64.0.1",
        "192.0.0.8",
        "192.88.99.1",
        "::1",
        "fd00::1",
        "fe80::1",
        "fec0::1",
        "3fff::1",
    )
    translated = ("::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1:7f00:0:100:808:808", "2002:7f00:1::", "::7f00:1")
    for address in private + translated:
        assert not is_public(address), address


def _led_on(times: int) -> str:
    """An address that leads to another one so often."""
    where = "/image.png"
    for _ in range(times):
        where = f"/to/?where={quote(where)}"
    return where


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("http://private.test/image.png", "private address"),
        ("http://127.0.0.2:{port}/image.png", "'127.0.0.2:{port}'"),
        ("http://[::1]/", "does not fetch images from"),
        ("//evil.test/image.png", "'evil.test'"),
        ("file:///etc/passwd", "only http, https and data"),
        ("http://images.test\\@evil.test", "not valid"),
        ("", "not valid"),
        (_led_on(4), "more than 3 times"),
    ],
)
def test_redirects(vision: LiveServer, host: ImageHost, where: str, why: str) -> None:
    host.asked.clear()
    port = str(host.port)
    url = f"http://images.test:{port}/to/?where={quote(where.replace('{port}', port))}"
    check_refused(asked(vision, url), why.replace("{port}", port))
    assert all(name == "images.test/to/" for name in host.asked)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing.png", "status 404"),
        ("page.png", "HTML"),
        ("squeezed.png", "compressed"),
        ("large.png", "more than 1048576 bytes"),
        ("endless.png", "more than 1048576 bytes"),
        ("slow.png", "within 2 seconds"),
    ],
)
def test_bodies(vision: LiveServer, host: ImageHost, name: str, why: str) -> None:
    check_refused(asked(vision, f"http://images.test:{host.port}/{name}"), why)


def test_a_host_that_does_not_answer(vision: LiveServer) -> None:
    check_refused(asked(vision, "http://images.test/image.png"), "does not answer")  # nothing listens at port 80


def test_counts(vision: LiveServer) -> None:
    url = data_url(WHOLE_PNG)
    answer = asked(vision, *[url] * 5)
    assert answer.status == 400
    assert answer.json()["error"]["message"] == "messages[0].content: a request may have at most 4 images"
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "image_url", "image_url": url}]},
    ]
    answer = post(vision, "/v1/chat/completions", {"messages": said})
    assert "holds no images" in answer.json()["error"]["message"]


def test_client_text_is_no_placeholder(vision: LiveServer) -> None:
    vision.says("Text.")
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    answer = post(vision, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
    assert answer.status == 200
    [request] = vision.scheduler.added
    assert request.images == ()
    content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": data_url(WHOLE_PNG)}}]
    answer = post(vision, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert answer.status == 200
    assert len(vision.scheduler.added[-1].images) == 1


def test_base64_with_line_breaks(vision: LiveServer) -> None:
    vision.says("A picture.")
    lines = base64.encodebytes(WHOLE_PNG).decode()
    assert asked(vision, f"data:image/png;base64,{lines}").status == 200
