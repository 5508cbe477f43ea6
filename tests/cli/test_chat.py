"""The terminal client: commands, history, and a conversation with a server that speaks OpenAI's API."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from rich.text import Text

from penstock.cli.chat import ChatError, Conversation, Reasoning, _write_answer, ask, command, first_model, wrapped


class FakeServer:
    """Answers with fixed pieces and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.thought = ""  # streamed before the answer
        self.fail_after = -1  # pieces before an error event; -1: none

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.bodies[-1]["messages"][-1]["content"] == "refuse":
            return web.json_response({"error": {"message": "no such thing"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.thought:
            thought = {"choices": [{"delta": {"reasoning": self.thought}}]}
            await response.write(f"data: {json.dumps(thought)}\n\n".encode())
        for i, piece in enumerate(("Hel", "lo", "!")):
            if i == self.fail_after:
                await response.write(b'data: {"error": {"message": "broke"}}\n\n')
                return response
            event = {"choices": [{"delta": {"content": piece}}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[FakeServer, str]]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/chat/completions", fake.chat)
    async with TestServer(app) as test_server:
        yield fake, str(test_server.make_url("")).rstrip("/")


async def say(conversation: Conversation, text: str) -> str:
    return "".join([piece async for piece in conversation.answer(text)])


async def test_a_conversation_keeps_its_history_and_parameters(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    conversation = Conversation(url, await first_model(url, {}))
    command("/system be brief", conversation)
    command("/params temperature=0.5 stop=x", conversation)
    assert await say(conversation, "hi") == "Hello!"
    assert await say(conversation, "again") == "Hello!"
    body = fake.bodies[-1]
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == "Hello!"
    assert (body["model"], body["temperature"], body["stop"]) == ("the-model", 0.5, "x")
    assert command("/params", conversation) == 'parameters: temperature=0.5 stop="x"'
    assert "name=value" in (command("/params temperature", conversation) or "")
    assert command("/params clear", conversation) == "parameters: the defaults"
    assert "4 of them cached" in conversation.stats.text()
    assert command("/clear", conversation) == "forgotten"
    assert conversation.messages == []
    assert command("/quit", conversation) is None
    assert "/stats" in (command("/help", conversation) or "")
    assert command("/nonsense", conversation) == "unknown command /nonsense; /help lists the commands"
    assert command("/param", conversation) == "unknown command /param; did you mean /params?"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("temperature=abc", "temperature is a number, not 'abc'"),
        ("temperature=true", "temperature is a number, not 'true'"),
        ("max_tokens=1.5", "max_tokens is a whole number, not '1.5'"),
        ("temprature=0.5", "there is no parameter temprature; did you mean temperature?"),
        ("top_k=5 max_tokens=ten", "max_tokens is a whole number, not 'ten'"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused(typed: str, said: str) -> None:
    conversation = Conversation("http://127.0.0.1:9", "m")
    assert command(f"/params {typed}", conversation) == said
    assert conversation.params == {}
    assert command("/params temperature=1 of_another_server=x", conversation) == (
        'parameters: temperature=1 of_another_server="x"'
    )


async def test_one_prompt_is_answered_and_that_is_all(
    server: tuple[FakeServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    conversation, file = Conversation(server[1], "m"), StringIO()
    assert await asyncio.to_thread(ask, conversation, Console(file=file), "hi") == 0
    assert file.getvalue() == "Hello!\n"
    conversation.messages = []
    assert await asyncio.to_thread(ask, conversation, Console(file=file), "refuse") == 1
    assert capsys.readouterr().err == "penstock: no such thing\n"


async def test_errors_are_told_and_forgotten(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    conversation = Conversation(url, "m")
    with pytest.raises(ChatError, match="no such thing"):
        await say(conversation, "refuse")
    assert conversation.messages == []
    fake.fail_after = 1
    with pytest.raises(ChatError, match="broke"):
        await say(conversation, "hi")
    with pytest.raises(ChatError, match=r"no server answers at http://127\.0\.0\.1:9 \(Connection refused\)"):
        await first_model("http://127.0.0.1:9", {})


async def test_an_answer_cut_short_stays_as_far_as_it_came(server: tuple[FakeServer, str]) -> None:
    conversation = Conversation(server[1], "m")
    answer = conversation.answer("hi")
    assert await anext(answer) == "Hel"
    await answer.aclose()  # type: ignore[attr-defined]
    assert conversation.messages[-1] == {"role": "assistant", "content": "Hel"}
    await asyncio.sleep(0)


async def test_thoughts_are_told_apart_and_not_kept(server: tuple[FakeServer, str]) -> None:
    fake, url = server
    fake.thought = "hm"
    conversation = Conversation(url, "m")
    pieces = [piece async for piece in conversation.answer("hi")]
    assert pieces == ["hm", "Hel", "lo", "!"]
    assert [isinstance(piece, Reasoning) for piece in pieces] == [True, False, False, False]
    assert conversation.messages[-1]["content"] == "Hello!"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_lines_break_between_words(size: int) -> None:
    text = "one two three  four\nfive sixsevene ight"
    console, lines, last = Console(width=8), list[str](), ""
    for i in range(0, len(text), size):
        *whole, last = (line.plain for line in wrapped(last + text[i : i + size], "", console))
        lines += whole
    lines = [*lines, last]
    assert [line.strip() for line in lines] == ["one two", "three", "four", "five", "sixseven", "e ight"]


async def test_an_answer_is_written_line_by_line(server: tuple[FakeServer, str]) -> None:
    server[0].thought = "hm, hm"
    file = StringIO()
    await _write_answer(Console(file=file), Conversation(server[1], "m"), "hi")
    assert file.getvalue() == "hm, hmHello!\n"
    await _write_answer(Console(width=80, force_terminal=True, file=file), Conversation(server[1], "m"), "hi")
    told = Text.from_ansi(file.getvalue()).plain
    assert told.endswith("Hello!\n"), told
    assert "hm, hm\n" in told
