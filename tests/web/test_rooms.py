"""All rooms in a real Chromium: they open, can be used by everybody, and fit narrow and wide windows."""

import re
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


async def test_a_narrow_window_is_for_the_room(browser: Any, served: Server) -> None:
    """The header takes one line, a long title is shown whole, and a message that is edited is in view."""
    async with paged(browser, served.url, viewport={"width": 375, "height": 720}) as page:
        await page.wait_for_selector("#prompt")
        await rendered(page, "document.querySelector('.light').dataset.state === 'ready'")
        assert await page.evaluate("document.querySelector('.bar').offsetHeight") <= 48
        assert await page.evaluate("document.querySelector('.talk-bar').offsetHeight") <= 48
        for text in (
            "What is continuous batching, and why is it that nobody waits?",
            "What is decode?",
            "What is TTFT?",
        ):
            answers = await page.locator(".message.assistant .figures:not([hidden])").count()
            await page.fill("#prompt", text)
            await page.press("#prompt", "Enter")
            await rendered(
                page, f"document.querySelectorAll('.message.assistant .figures:not([hidden])').length > {answers}"
            )
        title = page.locator(".talk-bar .title")
        assert await title.input_value() == "What is continuous batching, and why is it that…"
        assert await title.evaluate("field => field.scrollHeight <= field.clientHeight + 1")
        assert await title.evaluate("field => field.scrollWidth <= field.clientWidth")
        for message in (page.locator(".message.user").first, page.locator(".message.assistant").first):
            half = "message.getBoundingClientRect().top - message.parentElement.getBoundingClientRect().top + 40"
            await message.evaluate(f"message => message.parentElement.scrollTop += {half}")
            await message.get_by_role("button", name="Edit").evaluate("button => button.click()")
            box, room = await message.bounding_box(), await page.locator(".thread").bounding_box()
            assert box["y"] >= room["y"]
            assert box["y"] + box["height"] <= room["y"] + room["height"]
            await page.keyboard.press("Escape")


async def test_the_first_page_offers_questions(page: Any) -> None:
    await page.get_by_role("group", name="Examples").get_by_role("button").first.wait_for()
    assert (await page.locator("body").inner_text()).count("Chats stay in this browser.") == 1
    question = await page.locator(".questions button").first.inner_text()
    await page.locator(".questions button").first.click()
    await page.locator(".message.user").get_by_text(question, exact=True).wait_for()
    await page.wait_for_selector(".message.assistant .figures:not([hidden])")


async def test_the_scheduler_room_begins_with_what_was_before(page: Any) -> None:
    """The page has it kept, whichever room is open. A newcomer sees the steps of a chat that has ended."""
    room = "document.querySelector('scheduler-room')"
    async with page.expect_response(lambda answer: "hold=" in answer.url):
        await page.reload()
    await page.fill("#prompt", "What is prefill?")
    await page.press("#prompt", "Enter")
    await page.wait_for_selector(".message.assistant .figures:not([hidden])")
    await go(page, "scheduler")
    await rendered(page, f"{room}.store.numSteps > 5 && {room}.store.done.length > 0")
    await rendered(page, "document.querySelector('.empty').hidden")
    assert await page.evaluate(f"{room}.timeline.lanes") <= 4, "one row was used: it does not get a line of pixels"
    await page.evaluate(f"{room}.view.isLive = false; {room}.view.right -= 500;")
    await page.get_by_text("Nothing ran in this time.").wait_for()
    await page.get_by_role("button", name="Go to now").click()
    await rendered(page, f"{room}.view.isLive")
    await page.evaluate(f"{room}.view.seconds = 0.01")
    await page.get_by_role("button", name="Show what ran last").click()
    await rendered(page, f"!{room}.view.isLive && document.querySelector('.empty').hidden")


async def test_what_the_store_makes_of_messages(page: Any) -> None:
    """A message that comes twice counts once; steps that are not told do not go on while the device has nothing."""
    found = await page.evaluate(
        """async () => {
          const { Store } = await import("/ui/rooms/scheduler/store.js");
          const store = new Store();
          const step = (id, sent, more) => ({ id, left_out: 0, sent, returned: sent + 0.01, plan_us: 1,
            forward_us: 9000, idle_us: 0, decodes: [[3, 4]], chunks: [], guesses: [], waiting: 0,
            free_pages: 0, cached_pages: 0,
            host_pages: [0, 0], to_host: 0, from_host: 0, ...more });
          const batch = (number, now, steps) => ({ engine: "0", number, now, unix_time: 1e9 + now, steps, left_out: 0,
            events: [], events_left_out: 0, queue: [], num_waiting: 0, reasons: {}, totals: {}, picture: null });
          store.add(batch(1, 10, [step(0, 9.9)]));
          store.add(batch(2, 20, []));
          store.add(batch(3, 30, [step(5, 29.9, { left_out: 4, idle_us: 19.8e6 })]));
          store.add(batch(2, 20, []));
          store.add(batch(3, 30, [step(5, 29.9)]));
          const before = [store.numSteps, store.lostBatches, store.since, store.lastActive()];
          const rows = [store.highestRow(5, 10), store.highestRow(11, 19), store.highestRow(25, 30)];
          store.add(batch(1, 40, [step(0, 39.9)])); // another scheduler on the same machine
          return [...before, ...rows, store.until[0].toFixed(2), store.numSteps];
        }"""
    )
    assert found == [2, 0, 9.9, 30, 4, -1, 4, "10.10", 3]


async def test_compare_says_what_it_needs(page: Any) -> None:
    await go(page, "compare")
    await page.get_by_text("There is nothing to simulate yet").wait_for()
    assert await page.get_by_text("--record run.jsonl").is_visible()
    assert not await page.get_by_role("button", name="Simulate").is_visible()
    file = {"name": "run.jsonl", "mimeType": "application/json", "buffer": b"{}"}
    await page.get_by_label("File").set_input_files(file)
    await page.get_by_role("button", name="Simulate").wait_for()
    assert not await page.get_by_text("There is nothing to simulate yet").is_visible()


async def test_what_another_port_answers(browser: Any, served: Server) -> None:
    """With --admin-port this one has no such routes: it is said where they are, and they are not asked for again."""
    asked: list[str] = []

    async def refuse(route: Any) -> None:
        asked.append(route.request.url)
        await route.fulfill(status=404, json={"error": {"message": "there is nothing at …", "code": "not_found"}})

    async with paged(browser, served.url, ignoring=("404",)) as page:
        await page.clock.install()
        await page.route(re.compile("/debug/|/metrics$"), refuse)
        await page.reload()
        await rendered(page, "document.querySelector('.light').dataset.state === 'ready'")
        await go(page, "scheduler")
        await page.locator(".empty").filter(has_text="--admin-port").wait_for()
        await go(page, "compare")
        await page.get_by_role("status").get_by_text("--admin-port").wait_for()
        assert not await page.get_by_role("button", name="Simulate").is_visible()
        await page.clock.fast_forward("03:00")
        async with page.expect_response("**/ready"):
            pass
        assert len([url for url in asked if "hold=" in url]) == 1


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
    await go(page, "chat")
    await page.evaluate("location.hash = '#/metrics'")
    await page.wait_for_selector("metrics-room th")
    points, label = await page.evaluate(
        "[document.querySelector('metrics-room').charts[1].points.length, "
        "document.querySelectorAll('canvas')[1].getAttribute('aria-label')]"
    )
    assert points > 2, "what was read before is shown again"
    assert re.search(r"generated \d", label)


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
