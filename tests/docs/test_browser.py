"""The documentation site in a real browser: nothing overflows, all of it loads, text is readable in light and dark."""

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.docs.fences import ROOT
from tests.faults.soak import IS_SOAK

_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_WIDTHS = (390, 1280)  # a phone's and a desktop's
_LEAST_CONTRAST = 4.5  # WCAG 2 AA for text of normal size
_LOOK = """
(() => {
  const parse = color => color.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length < 4 || color[3] > 0.99) return color;
    }
    return parse(getComputedStyle(document.documentElement).backgroundColor);
  };
  const faint = [];
  for (const element of document.querySelectorAll("h1, h2, article :is(p, li, a, td, code)")) {
    if (!element.innerText || !element.offsetParent) continue;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < LEAST) faint.push(`${element.tagName} ${element.innerText.slice(0, 40)} ${contrast.toFixed(1)}`);
  }
  const root = document.documentElement;
  return {
    background: light(behind(document.querySelector("article"))),
    overflow: root.scrollWidth - root.clientWidth,
    faint: [...new Set(faint)].slice(0, 5),
    unloaded: performance.getEntriesByType("resource").filter(e => e.responseStatus >= 400).map(e => e.name)
      .concat([...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)),
  };
})()
""".replace("LEAST", str(_LEAST_CONTRAST))

pytestmark = pytest.mark.skipif(_BROWSER is None, reason="needs chromium")


class Tab:
    """A page of the browser, driven over its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last_id = 0

    async def do(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        await self._socket.send_json({"id": self._last_id, "method": method, "params": params})
        while (answer := await self._socket.receive_json(timeout=30)).get("id") != self._last_id:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def show(self, page: Path, width: int, scheme: str) -> dict[str, Any]:
        """Open a page, and say what it looks like."""
        await self.do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.do("Emulation.setEmulatedMedia", features=media)
        await self.do("Page.navigate", url=page.as_uri())
        is_shown = f'document.readyState + location.href == "complete{page.as_uri()}"'
        while not await self._value(is_shown):  # noqa: ASYNC110 - the browser has no event of ours
            await asyncio.sleep(0.02)
        return dict(await self._value(_LOOK))

    async def _value(self, expression: str) -> Any:
        answer = await self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Tab]:
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
    process = await asyncio.create_subprocess_exec(
        str(_BROWSER), *flags, f"--user-data-dir={profile}", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        told = profile / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not told.is_file() or len(told.read_text().split()) < 2:  # noqa: ASYNC110 - nor has the file system
                await asyncio.sleep(0.1)
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as http:
            async with http.put(f"http://127.0.0.1:{port}/json/new?about:blank") as response:
                address = json.loads(await response.text())["webSocketDebuggerUrl"]
            async with http.ws_connect(address, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    command = [sys.executable, "-m", "sphinx", "-q", str(ROOT / "docs"), str(tmp_path / "site")]
    subprocess.run(command, check=True, capture_output=True)
    return sorted((tmp_path / "site").glob("*.html"))


async def test_every_page_in_both_schemes_and_widths(pages: list[Path], tmp_path: Path) -> None:
    wrong, backgrounds = [], dict[str, float]()
    async with browser(tmp_path / "profile") as tab:
        shown = list(itertools.product(pages, _WIDTHS, ("light", "dark")))
        for page, width, scheme in shown if IS_SOAK else shown[::5]:  # each page once or so, in turns
            seen = await tab.show(page, width, scheme)
            backgrounds[scheme] = seen.pop("background")
            if any(seen.values()):
                wrong.append((page.name, width, scheme, seen))
    assert wrong == []
    assert backgrounds["light"] > 0.8
    assert backgrounds["dark"] < 0.1
