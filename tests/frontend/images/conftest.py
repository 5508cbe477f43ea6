"""A server of a small Qwen2-VL, and a host of images on the loopback interface that counts as public."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from penstock.frontend.image_source import ImageLimits
from penstock.parts.images.frontend.fetch import is_public
from penstock.parts.images.frontend.part import Images
from penstock.parts.images.options import ImageOptions
from tests.frontend.live_server import LiveServer, live_server
from tests.parts.images.image_models import MODELS, encoded, noise

RACCOON = "upload.wikimedia.org"


class ImageHost:
    """Serves images, and what is none, at one port of 127.0.0.1; counts what is asked of it under other names."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.asked: list[str] = []
        self.image = encoded(noise(120, 80))
        self.port = 0
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/{name:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.asked.append(f"{request.host.partition(':')[0]}/{name}")
        if name.startswith("to/"):
            return web.Response(status=302, headers={"Location": request.query["where"]})
        match name:
            case "image.png" | "raccoon":
                return web.Response(body=self.image, content_type="image/png")
            case "page.png":
                return web.Response(text="<!doctype html><p>No image.", content_type="image/png")
            case "squeezed.png":
                return web.Response(body=self.image, headers={"Content-Encoding": "gzip"})
            case "large.png":
                return web.Response(body=bytes(1 << 21))
            case "endless.png" | "slow.png":
                answer = web.StreamResponse()
                await answer.prepare(request)
                try:
                    while True:
                        await answer.write(bytes(1 << 16 if name == "endless.png" else 1))
                        await asyncio.sleep(0 if name == "endless.png" else 0.05)
                except ConnectionError:
                    return answer
        return web.Response(status=404)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="package")
def host() -> Iterator[ImageHost]:
    host = ImageHost()
    yield host
    host.close()


@pytest.fixture(scope="package")
def shared_vision(tmp_path_factory: pytest.TempPathFactory, host: ImageHost) -> Iterator[LiveServer]:
    folder = MODELS["qwen2-vl"].write(tmp_path_factory.mktemp("vision"))
    port = host.port
    names = ("images.test", "private.test", "mapped.test", "mixed.test", "metadata.test", "translated.test")
    hosts = (*(f"{name}:{port}" for name in names), "images.test", "private.test", "*.cdn.test", "127.0.0.1", "[::1]")
    options = ImageOptions(image_hosts=hosts, max_images=4, image_memory_gib=0.125)
    small = ImageLimits(4, max_bytes=1 << 20, max_pixels=1 << 22, seconds=2.0)
    patch = pytest.MonkeyPatch()  # only for this server
    patch.setattr("penstock.parts.images.frontend.part.ImageLimits", lambda max_images: small)
    with (
        tempfile.TemporaryDirectory(prefix="pst-") as sockets,
        live_server(
            folder, Path(sockets), parts=(options,), takes_images=True, max_model_len=2048, names=("vision", "gpt-5.5")
        ) as live,
    ):
        patch.undo()
        images = live.server.service.parts.get(Images)
        assert images is not None
        fetcher = images.reader.fetcher
        known = {
            "images.test": ["127.0.0.1"],
            "private.test": ["10.0.0.7"],
            "mapped.test": ["::ffff:192.168.0.1"],
            "mixed.test": ["127.0.0.1", "192.168.0.1"],
            "metadata.test": ["169.254.169.254"],
            "translated.test": ["64:ff9b::a00:7"],
        }

        async def resolve(name: str, port: int) -> list[str]:
            if name not in known:
                raise OSError("no such host")
            return known[name]

        fetcher.resolve = resolve
        fetcher.is_public = lambda address: address == "127.0.0.1" or is_public(address)
        yield live


@pytest.fixture
def vision(shared_vision: LiveServer) -> Iterator[LiveServer]:
    """The shared server; each test leaves it with nothing running."""
    shared_vision.reset()
    yield shared_vision
    shared_vision.wait_until(lambda: len(shared_vision.server.service.generations) == 0)
    shared_vision.wait_until(lambda: shared_vision.scheduler.num_running == 0)
