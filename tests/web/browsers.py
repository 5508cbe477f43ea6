"""A Chromium for tests, and pages that note whatever a page should not do."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
WAIT_MS = 60_000
"""For what should come at once: the machine may be busy."""


@asynccontextmanager
async def launched() -> AsyncIterator[Any]:
    """A browser."""
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def paged(browser: Any, url: str, *, ignoring: tuple[str, ...] = (), **options: Any) -> AsyncIterator[Any]:
    """A page of a browser that has nothing stored.

    At its end, it must not have broken its policy, asked another site, or written an error to the console, except for
    those that contain a text of `ignoring`.
    """
    context = await browser.new_context(**options)
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    wrong: list[str] = []

    def note(kind: str, text: str) -> None:
        if not any(each in text for each in ignoring):
            wrong.append(f"{kind}: {text}")

    def look(asked: str) -> None:
        if not asked.startswith((url, "data:", "blob:")):
            wrong.append(f"request to elsewhere: {asked}")

    page.on("pageerror", lambda error: note("exception", str(error)))
    page.on("console", lambda told: note("console", told.text) if told.type in ("error", "warning") else None)
    page.on("request", lambda request: look(request.url))
    await page.goto(url)
    yield page
    await context.close()
    assert not wrong


async def rendered(page: Any, script: str) -> None:
    """Wait until a JavaScript expression is true in the page, which forbids `eval` and so Playwright's own waiting."""
    async with asyncio.timeout(WAIT_MS / 1000):
        while not await page.evaluate(f"() => {{ return {script}; }}"):  # noqa: ASYNC110 (the page tells nobody)
            await asyncio.sleep(0.03)
