"""The Chat room in a real Chromium, over a server with the demo model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server
from tests.web.browsers import NEEDS_CHROMIUM, paged, rendered
from tests.web.cuttable import Cuttable

pytestmark = [NEEDS_CHROMIUM, pytest.mark.asyncio(loop_scope="session")]

ANSWER = ".message.assistant .body"
ENDED = "document.querySelector('.composer button[type=submit]').textContent === 'Send'"
ENDLESS = {"ignore_eos": "true", "max_tokens": "1900"}


async def ask(page: Any, text: str, *, ends: bool = True) -> None:
    """Send a message, and wait for the end of its answer."""
    answers = await page.locator(".message.assistant").count()
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")
    await rendered(page, f"document.querySelectorAll('.message.assistant').length > {answers}")
    if ends:
        await rendered(page, ENDED)


async def settle(page: Any, **fields: str) -> None:
    """Open the settings and fill fields in."""
    if not await page.locator("#settings").is_visible():
        await page.get_by_role("button", name="Settings").click()
    for name, value in fields.items():
        field = page.locator(f"#field-{name}")
        await field.evaluate("field => field.closest('details').open = true")
        await (field.select_option(value) if name == "ignore_eos" else field.fill(value))


def button(page: Any, name: str) -> Any:
    return page.locator(".message.assistant").last.get_by_role("button", name=name, exact=True)


async def test_an_answer_with_its_figures_lasts_over_a_reload(page: Any) -> None:
    await ask(page, "What is paged attention?")
    text = await page.locator(ANSWER).inner_text()
    assert "page" in text.lower()
    figures = await page.locator(".message.assistant .figures").inner_text()
    assert "First token" in figures
    assert "tokens/s" in figures
    assert "cached" in figures
    await rendered(page, "location.hash.includes('c=')")
    await page.reload()
    await page.locator(ANSWER).get_by_text(text, exact=True).wait_for()
    await page.evaluate("location.hash = '#/metrics'")
    await page.wait_for_selector("metrics-room")
    await page.evaluate("location.hash = '#/chat'")
    await page.locator(ANSWER).get_by_text(text, exact=True).wait_for()


async def test_stop_and_continue(page: Any) -> None:
    await settle(page, **ENDLESS)
    await ask(page, "What is decode?", ends=False)
    await rendered(page, f"document.querySelector('{ANSWER}').textContent.length > 20")
    await page.keyboard.press("Escape")
    await rendered(page, ENDED)
    await page.get_by_text("It was stopped.").wait_for()
    before = await page.locator(ANSWER).inner_text()
    await settle(page, max_tokens="8")
    await button(page, "Continue").click()
    await page.get_by_text("It was cut at the limit of tokens.").wait_for()
    after = await page.locator(ANSWER).inner_text()
    assert after.startswith(before[:20])
    assert len(after) > len(before)


async def test_edits_and_regenerated_answers_are_branches(page: Any) -> None:
    await ask(page, "What is prefill?")
    first = await page.locator(ANSWER).inner_text()
    await button(page, "Regenerate").click()
    await rendered(page, "document.querySelector('.message.assistant .siblings')?.textContent.includes('2 / 2')")
    await rendered(page, ENDED)
    await page.locator(".message.user").get_by_role("button", name="Edit").click()
    await page.get_by_label("The message").fill("What is decode?")
    await page.get_by_label("The message").press("Control+Enter")
    await rendered(page, "document.querySelector('.message.user .siblings')?.textContent.includes('2 / 2')")
    await rendered(page, ENDED)
    assert "What is decode?" in await page.locator(".message.user").inner_text()
    await page.get_by_role("button", name="Previous branch").click()
    await page.locator(".message.user").get_by_text("What is prefill?").wait_for()
    await page.locator(".message.assistant").get_by_role("button", name="Previous branch").click()
    await rendered(page, "document.querySelector('.message.assistant .siblings')?.textContent.includes('1 / 2')")
    await page.locator(ANSWER).get_by_text(first, exact=True).wait_for()
    await page.locator(".message.assistant").get_by_role("button", name="Delete").click()
    await rendered(page, "!document.querySelector('.message.assistant .siblings')")
    await page.get_by_role("button", name="Undo").click()
    await rendered(page, "document.querySelector('.message.assistant .siblings')?.textContent.includes('1 / 2')")


async def test_another_token_begins_a_branch(page: Any) -> None:
    await settle(page, temperature="0")
    await ask(page, "What is paged attention?")
    await button(page, "Tokens").click()
    tokens = page.locator(".token")
    shown = [await token.text_content() for token in await tokens.all()]
    await tokens.first.focus()
    for _ in range(2):
        await page.keyboard.press("ArrowRight")
    await page.keyboard.press("Enter")
    choice = page.locator(".alternatives button:not(:disabled)").first
    other = (await choice.locator("code").inner_text()).replace("␣", " ")
    await choice.click()
    await rendered(page, "document.querySelector('.message.assistant .siblings')?.textContent.includes('2 / 2')")
    await rendered(page, ENDED)
    text = await page.locator(ANSWER).inner_text()
    assert text.startswith("".join(shown[:2]) + other)
    assert len(text) > len("".join(shown[:2]) + other)


async def test_a_schema_is_checked_and_enforced(page: Any) -> None:
    await settle(page, max_tokens="60")
    form = page.locator("#setting-form")
    await form.evaluate("field => field.closest('details').open = true")
    await form.select_option("json_schema")
    editor = page.locator("#setting-formText")
    await editor.fill('{"type": "object",}')
    assert await editor.get_attribute("aria-invalid") == "true"
    await page.fill("#prompt", "What is 7 times 8?")
    await page.press("#prompt", "Enter")
    await page.get_by_role("alert").get_by_text("form of the answer: not JSON").wait_for()
    assert await page.input_value("#prompt") == "What is 7 times 8?", "it was not sent, and is not lost"
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}}
    await editor.fill(json.dumps(schema | {"required": ["n"], "additionalProperties": False}))
    assert await editor.get_attribute("aria-invalid") is None
    await page.press("#prompt", "Enter")
    await page.wait_for_selector(".figures:not([hidden])")
    assert 0 <= json.loads(await page.locator(ANSWER).inner_text())["n"] <= 99


async def test_export_delete_import_rename_and_search(page: Any, tmp_path: Path) -> None:
    await ask(page, "What is decode?")
    text = await page.locator(ANSWER).inner_text()
    await page.get_by_label("Title of this chat").fill("A steady pace")
    await page.get_by_label("Title of this chat").press("Enter")
    await page.locator(".chats").get_by_text("A steady pace").wait_for()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export", exact=True).click()
    file = tmp_path / "chat.json"
    await (await download.value).save_as(file)
    await page.get_by_role("button", name="Delete A steady pace").click()
    await rendered(page, "document.querySelectorAll('.chats li').length === 0")
    async with page.expect_file_chooser() as chooser:
        await page.get_by_role("button", name="Import").click()
    await (await chooser.value).set_files(file)
    await page.locator(ANSWER).get_by_text(text, exact=True).wait_for()
    await page.fill("#chat-search", "nothing of the sort")
    await page.get_by_text("No chat has that.").wait_for()
    await page.fill("#chat-search", text.split(".")[0].upper())
    await page.locator(".chats").get_by_text("A steady pace").wait_for()


TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
CHUNKS: list[dict[str, Any]] = [
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"reasoning": "The user wants **the time**."}},
    {"delta": {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_time"}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"zone":'}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"UTC"}'}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
]
MARKDOWN = """# Noon

It is **noon** in *UTC*, `12:00`.<img src=x onerror=alert(1)>

1. one
2. two
   - inner

| zone | hour |
| --- | ---: |
| UTC | 12 |

> quoted

[good](https://example.org/a) [bad](javascript:alert(1))

```python
print("<b>")
```
"""

TOLD: list[dict[str, Any]] = [{"delta": {"content": MARKDOWN}}, {"delta": {}, "finish_reason": "stop"}]


def stream(choices: list[dict[str, Any]]) -> str:
    """The body of an answer."""
    chunks = [{"model": "m", "choices": [{"index": 0, **choice}]} for choice in choices]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


async def test_calls_are_answered_by_hand_and_markdown_is_never_html(page: Any) -> None:
    """The demo model calls no tools: what the server would send is played, what it would be sent is looked at."""
    asked: list[dict[str, Any]] = []

    async def play(route: Any) -> None:
        asked.append(json.loads(route.request.post_data))
        await route.fulfill(content_type="text/event-stream", body=stream(CHUNKS if len(asked) == 1 else TOLD))

    await page.route("**/v1/chat/completions", play)
    await page.get_by_role("button", name="Settings").click()
    await page.locator("#setting-tools").evaluate("field => field.closest('details').open = true")
    await page.fill("#setting-system", "Be brief.")
    await page.fill("#setting-tools", json.dumps(TOOLS))
    await settle(page, temperature="0.5", stop="END\nSTOP")
    await ask(page, "What time is it?")
    assert await page.locator(".message.assistant .reasoning").get_attribute("open") is None, "reasoning is folded"
    assert '"zone": "UTC"' in await page.locator(".calls code").last.inner_text()
    await page.get_by_label("Result of get_time").fill("12:00")
    await page.get_by_role("button", name="Send results").click()
    answer = page.locator(".message.assistant").last.locator(".markdown").last
    await answer.locator("h3").get_by_text("Noon").wait_for()
    first, second = asked
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
    ]
    assert (first["tools"], first["temperature"], first["stop"]) == (TOOLS, 0.5, ["END", "STOP"])
    assert "top_p" not in first, "what is not set is not sent"
    called, told = second["messages"][2:]
    assert called["tool_calls"][0]["function"] == {"name": "get_time", "arguments": '{"zone":"UTC"}'}
    assert told == {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
    assert await answer.locator("img, b, script").count() == 0
    assert await answer.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel.includes('noopener')])") == [
        ["https://example.org/a", True]
    ]
    assert await answer.locator("ol > li").count() == 2
    assert await answer.locator("ol ul li").inner_text() == "inner"
    assert await answer.locator("td").all_inner_texts() == ["UTC", "12"]
    assert await answer.locator("pre code").inner_text() == 'print("<b>")'


@pytest.mark.parametrize("is_kept", [True, False])
async def test_an_answer_goes_on_when_the_server_is_back(browser: Any, served: Server, is_kept: bool) -> None:
    """The stream is continued; if the server has started anew and knows nothing of it, the text is."""
    async with Cuttable.serving(served.url) as between:
        ignoring = ("net::ERR_", "Failed to load resource")  # Chromium says so of every lost connection
        async with paged(browser, between.url, ignoring=ignoring) as page:
            await settle(page, temperature="0")
            await rendered(page, "document.querySelector('.light').dataset.state === 'ready'")
            await ask(page, "What is paged attention?")
            whole = await page.locator(ANSWER).inner_text()
            if not is_kept:
                await page.route("**/v1/streams/*", lambda route: route.fulfill(status=404, json={}))
            between.cut_at = b"content"
            await button(page, "Regenerate").click()
            await page.get_by_text("waiting for the server").wait_for()
            await page.get_by_text("reconnecting…").wait_for()
            between.is_up = True
            await rendered(page, ENDED)
            assert await page.locator(ANSWER).inner_text() == whole
            await rendered(page, "document.querySelector('.light').dataset.state === 'ready'")


async def test_with_the_keyboard_alone(page: Any) -> None:
    await page.locator("#prompt").wait_for()
    for _ in range(40):
        await page.keyboard.press("Tab")
        if await page.evaluate("document.activeElement.id === 'prompt'"):
            break
    await page.keyboard.type("What is prefill?")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".figures:not([hidden])")
    for _ in range(40):
        await page.keyboard.press("Shift+Tab")
        if await page.evaluate("document.activeElement.dataset.act === 'regenerate'"):
            break
    await page.keyboard.press("Enter")
    await rendered(page, "document.querySelector('.message.assistant .siblings')?.textContent.includes('2 / 2')")
    await rendered(page, ENDED)
    await page.keyboard.press("Control+Shift+O")
    await page.get_by_text("What shall the model answer?").wait_for()
    assert await page.evaluate("document.activeElement.id") == "prompt"
