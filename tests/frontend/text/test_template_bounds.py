"""Chat templates that never end, and texts that take too long, cost the one request that asked, and nobody else."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from penstock import demo
from penstock.config import ConfigError
from penstock.frontend.api import service
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.child_pool import ChildDiedError, ChildPool, ChildTooSlowError
from tests.frontend.checkpoint_folder import CHATML, write_checkpoint
from tests.frontend.http_client import chat, complete, error_of, post
from tests.frontend.live_server import LiveServer, live_server
from tests.processes import children_named

TRAPS = (
    "{% if messages[0].content == 'for ever' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0].content == 'memory' %}{% set x = 'x' * 10000000000 %}{{ x | length }}"
    "{% elif messages[0].content == 'output' %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"
    "{% elif messages[0].content == 'range' %}{% for i in range(10000000000) %}x{% endfor %}"
    "{% elif messages[0].content == 'power' %}{{ 9 ** (9 ** 9) }}"
    "{% elif messages[0].content == 'escape' %}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    "{% elif messages[0].content == 'globals' %}{{ raise_exception.__globals__['sys'] }}"
    "{% elif messages[0].content == 'recursion' %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("trapped"), chat_template=TRAPS + CHATML)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "MAX_RENDER_SECONDS", 0.7)
        sockets = tmp_path_factory.mktemp("s")
        with live_server(folder, sockets) as live:
            yield live


@pytest.mark.parametrize(
    ("trap", "says"),
    [
        ("for ever", "takes longer than"),
        ("power", "takes longer than"),
        ("memory", "memory"),
        ("output", "more than"),
        ("range", "Range too big"),
        ("escape", "unsafe"),
        ("globals", "unsafe"),
        ("recursion", "RecursionError"),
    ],
)
def test_a_template_that_does_not_end_well(trapped: LiveServer, trap: str, says: str) -> None:
    assert chat(trapped).status == 200
    began = time.monotonic()
    error = error_of(chat(trapped, messages=[{"role": "user", "content": trap}]), 400)
    code = "context_length_exceeded" if trap == "output" else "chat_template_error"
    assert (error["code"], error["param"]) == (code, "messages")
    assert says in error["message"]
    assert time.monotonic() - began < 60  # it would take a day
    assert chat(trapped).status == 200
    for pid in children_named("penstock-text"):  # nothing computes on
        assert psutil.Process(pid).cpu_percent(0.05) < 50


def test_a_template_that_never_ends_does_not_keep_the_server_from_starting(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried out at the start; if that does not end, its words say what the formats are."""
    monkeypatch.setattr(service, "MAX_RENDER_SECONDS", 0.5)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}<think></think>"
    with live_server(write_checkpoint(tmp_path, chat_template=endless), sockets) as live:
        assert error_of(chat(live), 400)["code"] == "chat_template_error"
        model = live.server.service.model
        assert model.reasoning_format is not None
        assert model.reasoning_format.name == "think"
        assert model.tool_format is not None
        assert model.tool_format.name == "generic"


def test_others_go_on_meanwhile(trapped: LiveServer) -> None:
    stuck = {"messages": [{"role": "user", "content": "for ever"}]}

    async def both() -> tuple[int, int]:
        trapping = asyncio.create_task(asyncio.to_thread(lambda: post(trapped, "/v1/chat/completions", stuck).status))
        await asyncio.sleep(0.1)
        fine = await asyncio.to_thread(lambda: chat(trapped).status)
        return await trapping, fine

    assert asyncio.run(both()) == (400, 200)


def test_long_texts_give_the_same_tokens(
    trapped: LiveServer, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    text = "Water runs down the pipe \u4e2d\u6587 \U0001f600 " * 20
    before = post(trapped, "/tokenize", {"prompt": text}).json()["tokens"]
    monkeypatch.setattr(service, "SHORT_TEXT", 10)
    assert post(trapped, "/tokenize", {"prompt": text}).json()["tokens"] == before
    monkeypatch.setattr(service, "MAX_ENCODE_SECONDS", 0.0)
    error = error_of(complete(trapped, text), 400)
    assert error["param"] == "prompt"
    assert "takes longer than" in error["message"]
    monkeypatch.undo()
    assert complete(trapped, "Hello").status == 200


@pytest.mark.parametrize("run", ["x", "^", " ", "\u0e01", "\U0001f9d1\u200d"], ids=ascii)
def test_a_text_four_times_as_long_takes_about_four_times_as_long(run: str) -> None:
    """One run of the same, which some tokenizers look at again from each of its characters."""
    tokenizer = Tokenizer.from_file(str(Path(demo.__file__).parent / "model" / "tokenizer.json"))

    def seconds(num_chars: int) -> float:
        text = run * (num_chars // len(run))
        times = []
        for _ in range(5):
            began = time.process_time()
            tokenizer.encode(text)
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(64 << 10) < 10 * seconds(16 << 10)


@pytest.mark.parametrize(
    "source",
    ["{% if 1 %}" * 5500 + "{% endif %}" * 5500, "{{ " + "(" * 5500 + "1" + ")" * 5500 + " }}", "{% for %}"],
    ids=["blocks", "parentheses", "syntax"],
)
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate(source, {})


def test_nothing_of_a_template_is_computed_when_it_is_read() -> None:
    began = time.monotonic()
    ChatTemplate("{{ 9 ** (9 ** 9) }}{{ 'x' * 10000000000 }}", {})
    assert time.monotonic() - began < 60  # it would take years


async def test_the_pool_outlives_what_it_kills(checkpoint: Path) -> None:
    pool = ChildPool(
        "penstock.frontend.text.child",
        (str(checkpoint), "", "text"),
        max_processes=1,
        max_queued=4,
        max_answer_bytes=1 << 20,
    )
    await pool.warm()
    [first] = pool.process_ids
    assert (await pool.ask(["encode", ["Hello", ""], False], 20))[1] == ""
    assert pool.process_ids == [first]
    with pytest.raises(ChildTooSlowError):
        await pool.ask(["encode", ["Hello " * 200_000, ""], False], 0.0)
    with pytest.raises(ChildDiedError):
        await pool.ask(["no such question"], 20)
    assert (await pool.ask(["encode", ["Hello", ""], False], 20))[1] == ""
    asking = asyncio.create_task(pool.ask(["encode", ["Hello", ""], False], 20))
    await asyncio.sleep(0)
    asking.cancel()  # a client leaves: a process that is as good as done is kept
    await asyncio.wait({asking})
    await pool.close()
    assert not psutil.pid_exists(first)
