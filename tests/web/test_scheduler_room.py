"""The Scheduler and Compare rooms in a real Chromium, over a server that answers."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import pytest

from tests.e2e.servers import Server, serving
from tests.faults.soak import only_in_soak

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
    pytest.mark.timeout(400),
]
MODEL = Path(__file__).parents[2] / "demo" / "model"
STATIC = Path(__file__).parents[2] / "frontend" / "web" / "static"
WAIT = 60_000
"""Milliseconds: the machine may be busy."""


class Page:
    """A page, and what it complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._on_console)

    def _on_console(self, told: Any) -> None:
        if told.type == "error":
            self.complaints.append(told.text)

    async def holds(self, script: str) -> None:
        """Wait until this is true of the page."""
        async with asyncio.timeout(WAIT / 1000):
            while not await self.page.evaluate(script):  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Page]:
    async with playwright.async_playwright() as browsers:
        browser = await browsers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = Page(await browser.new_page(**options))
        await page.page.goto(url)
        yield page
        assert not page.complaints, "neither an error nor a violation of the policy"
        await browser.close()


@asynccontextmanager
async def loaded(server: Server, num_clients: int) -> AsyncIterator[None]:
    """Requests come all the time."""
    async with aiohttp.ClientSession() as session:

        async def client(number: int) -> None:
            count = 0
            while True:
                count += 1
                body = {"prompt": f"Once {number} {count} " * 20, "max_tokens": 60, "ignore_eos": True}
                names = {"x-request-id": f"client-{number}-{count}-" + "x" * 24}  # as long as a UUID
                async with session.post(f"{server.url}/v1/completions", json=body, headers=names) as answer:
                    assert answer.status == 200

        clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
        yield
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def no_violations(page: Page, within: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.async_playwright")
    found = await axe.Axe().run(page.page, context=within)
    assert not found.violations_count, found.generate_report()


async def test_steps_a_request_and_a_simulation(tmp_path: Path) -> None:
    """One server for all: starting it takes longest."""
    flags = ("--max-num-seqs", "2", "--record", str(tmp_path / "run.jsonl"))
    async with serving(MODEL, *flags) as server, opened(f"{server.url}/#/scheduler", color_scheme="dark") as page:
        tab = page.page
        async with loaded(server, 4):
            await tab.locator("scheduler-room[data-has-steps][data-connected]").wait_for()
            await page.holds("document.querySelector('scheduler-room').store.done.length > 2")
            # The queue says why; a request of it is shown with its waits.
            await tab.get_by_text("no free row").first.wait_for()
            name = tab.locator(".queue tbody .id").first
            told, shown, height = await name.evaluate("each => [each.title, each.textContent, each.offsetHeight]")
            assert len(told) > 30 > len(shown), "shortened, and whole on hover"
            assert "…" in shown
            assert height < 30, "in one line"
            await tab.locator(".panels table button.link").first.click()
            await tab.locator(".life[data-key]").wait_for()
            await tab.get_by_role("cell", name="no free row").first.wait_for()
            # By keys: a row, and who has it.
            await tab.locator("canvas.timeline").focus()
            for key in ("+", "ArrowLeft", "-", "ArrowDown", "ArrowDown", "Enter", "f"):
                await tab.keyboard.press(key)
            await tab.get_by_text("Row 1,").wait_for()
            await page.holds("document.querySelector('scheduler-room').view.isLive")
            await tab.keyboard.press("Space")
            await tab.get_by_role("button", name="Go on").click()
            # As words, and what owns the pages.
            await tab.get_by_text("The timeline as a table").click()
            await tab.get_by_role("columnheader", name="In the last step").wait_for()
            await page.holds("document.querySelectorAll('scheduler-room .pages figure').length === 1")
            await tab.get_by_role("button", name="Refresh").click()
            await page.holds("/tokens/.test(document.querySelector('.prefixes').textContent)")
            await no_violations(page, "scheduler-room")
            await tab.set_viewport_size({"width": 375, "height": 800})
            await page.holds("document.querySelector('main').scrollWidth <= 375")
            await tab.set_viewport_size({"width": 1280, "height": 900})
        await tab.evaluate("location.hash = '#/compare'")
        await tab.get_by_label("Recording").select_option("run.jsonl")
        await tab.get_by_label("Options", exact=True).nth(1).fill("--max-num-seqs -1")
        await tab.get_by_role("button", name="Simulate").click()
        await tab.get_by_role("status").filter(has_text="--max-num-seqs").wait_for()
        await tab.get_by_label("Options", exact=True).nth(1).fill("--max-num-seqs 1 --scheduling-policy sjf")
        await tab.get_by_role("button", name="Simulate").click()
        await tab.get_by_role("heading", name="Results").wait_for()
        await tab.get_by_role("columnheader", name="few rows").wait_for()
        assert await tab.locator("compare-room figure canvas").count() == 5
        await no_violations(page, "compare-room")
        await tab.set_viewport_size({"width": 375, "height": 800})
        await page.holds("document.querySelector('main').scrollWidth <= 375")
        page.complaints = [text for text in page.complaints if "400" not in text]  # the refusal above


_LAST_ID = (
    "((store) => store.ids[(store.numSteps - 1) % store.maxSteps])(document.querySelector('scheduler-room').store)"
)


@only_in_soak
async def test_steps_go_on_when_the_scheduler_has_been_restarted() -> None:
    async with serving(MODEL) as server, opened(f"{server.url}/#/scheduler") as page, loaded(server, 2):
        await page.page.locator("scheduler-room[data-has-steps][data-connected]").wait_for()
        await page.holds(f"{_LAST_ID} > 3000")
        [scheduler] = [child for name, child in server.children().items() if "scheduler" in name]
        scheduler.kill()
        await page.holds(f"{_LAST_ID} < 2900")  # another scheduler counts from 0
        page.complaints = [text for text in page.complaints if "503" not in text]  # while there was none


_DIFFERENCE = """() => {
  const timeline = document.querySelector("scheduler-room").timeline;
  const pixels = () => {
    timeline.draw();
    const found = timeline.inBuffer.getImageData(0, 0, timeline.buffer.width, timeline.buffer.height);
    return new Uint32Array(found.data.buffer);
  };
  const moved = pixels();
  timeline.numRight = 0; // all of it is painted again
  const anew = pixels();
  return [moved.filter((pixel, place) => pixel !== anew[place]).length / moved.length, new Set(anew).size];
}"""


@only_in_soak
async def test_the_timeline_moves_as_if_it_were_painted_anew(tmp_path: Path) -> None:
    """256 rows of an engine that is not there; no server is asked for anything but the page's files."""
    handler = partial(QuietFiles, directory=str(STATIC))
    files = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=files.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{files.server_port}/index.html#/scheduler?synthetic=256"
        async with opened(address, viewport={"width": 1280, "height": 900}) as page:
            await page.page.locator("scheduler-room[data-has-steps]").wait_for()
            for width in (0.5, 3.0):
                await page.page.evaluate(f"document.querySelector('scheduler-room').view.seconds = {width}")
                before = await page.page.evaluate("document.querySelector('scheduler-room').store.numSteps")
                await page.holds(f"document.querySelector('scheduler-room').store.numSteps > {before + 100}")
                await page.page.get_by_role("button", name="Pause").click()
                difference, num_colors = await page.page.evaluate(_DIFFERENCE)
                assert difference < 0.03  # one pixel too far would change 0.035 or more
                assert num_colors >= 4, "decodes, prompts, rows, paper"
                await page.page.get_by_role("button", name="Go on").click()
            assert await page.page.evaluate("document.querySelector('scheduler-room').framesPerSecond") > 0
            page.complaints = [text for text in page.complaints if "404" not in text and "answer" not in text]
    finally:
        files.shutdown()
        thread.join()


class QuietFiles(SimpleHTTPRequestHandler):
    """The page's files at the places where the server has them."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.removeprefix("/ui"))

    def log_message(self, *args: Any) -> None:
        """Nothing is printed."""
