"""All rooms in a real Chromium: they open, can be used by everybody, and fit narrow and wide windows."""

from typing import Any

import pytest

from tests.e2e.servers import Server
from tests.web.browsers import NEEDS_CHROMIUM, paged, rendered

axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="axe-playwright-python is not installed")

pytestmark = [NEEDS_CHROMIUM, pytest.mark.asyncio(loop_scope="session")]

ROOMS = ("chat", "scheduler", "compare", "metrics")


async def go(page: Any, room: str) -> None:
    await page.evaluate(f"location.hash = '#/{room}'")
    await page.wait_for_selector(f"{room}-room > *", state="attached")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_everybody_can_use_every_room(page: Any, theme: str) -> None:
    await page.wait_for_selector("chat-room > *")
    await page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    for room in ROOMS:
        await go(page, room)
        if room == "chat":
            await page.fill("#prompt", "What is prefill?")
            await page.press("#prompt", "Enter")
            await page.wait_for_selector(".figures:not([hidden])")
            await page.get_by_role("button", name="Tokens").click()
            await page.locator(".token").first.click()
            await page.get_by_role("button", name="Settings").click()
        found = await axe.Axe().run(page)
        wrong = {rule["id"]: [node["html"] for node in rule["nodes"]] for rule in found.response["violations"]}
        assert not wrong, room


@pytest.mark.parametrize("width", [375, 3840])
async def test_nothing_is_cut_off(browser: Any, served: Server, width: int) -> None:
    async with paged(browser, served.url, viewport={"width": width, "height": 800}) as page:
        for room in ROOMS:
            await go(page, room)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), room
        await go(page, "chat")
        await page.get_by_role("button", name="Settings").click()
        await page.locator("#setting-system").wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_metrics_show_what_happens(page: Any) -> None:
    await go(page, "metrics")
    await page.locator("metrics-room th").get_by_text("the only one").wait_for()
    await page.evaluate(
        """fetch("/v1/completions", {
            method: "POST", headers: {"Content-Type": "application/json"},
            body: JSON.stringify({prompt: "Prefill", max_tokens: 20, ignore_eos: true}),
        }).then((answer) => answer.text())"""
    )
    shown = "document.querySelector('[aria-label=\"Tokens per second\"] strong').textContent"
    await rendered(page, f"Number.parseFloat({shown}) > 0")
    label = page.locator("canvas[role=img]").nth(2)
    await rendered(page, "/p50 \\d/.test(document.querySelectorAll('canvas')[2].getAttribute('aria-label'))")
    assert "Time to first token, now: p50" in str(await label.get_attribute("aria-label"))
    await page.locator(".chart summary").first.click()
    await page.locator(".chart table tbody tr").first.wait_for()
    await page.locator("metrics-room th").get_by_text("/v1/completions").wait_for()


async def test_a_key_is_asked_for_and_used(browser: Any, served: Server) -> None:
    """The server here has no keys: one that has answers as is played."""
    seen: list[str] = []

    async def guard(route: Any) -> None:
        key = await route.request.header_value("authorization")
        seen.append(key or "")
        if key == "Bearer secret":
            await route.fulfill(json={"data": [{"id": "guarded"}]})
        else:
            await route.fulfill(status=401, json={"error": {"message": "a key is needed", "code": "invalid_api_key"}})

    async with paged(browser, served.url, ignoring=("401",)) as page:
        await page.route("**/v1/models", guard)
        await page.reload()
        await page.locator("#api-key").fill("secret")
        await page.get_by_role("button", name="Use it").click()
        await page.locator("server-state").get_by_text("guarded").wait_for()
        assert seen[-1] == "Bearer secret"
        assert await page.evaluate("Object.values(localStorage).every(value => !value.includes('secret'))")
