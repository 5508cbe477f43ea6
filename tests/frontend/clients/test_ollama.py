"""Ollama's own Python client, unchanged: sync and async, streamed and whole, thinking, tools, and what is refused."""

import asyncio
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest

from penstock.frontend.errors import InvalidParameter
from penstock.ipc.messages import AddRequest
from penstock.parts.ollama.frontend.messages import chat_messages
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import Response, get, post, send
from tests.frontend.live_server import LiveServer, made_server

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> answer with <tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    " {{ call.id }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.name }} {{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
TEXT = "Water runs down the pipe."
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}\n</tool_call>'
FIGURES = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"),
}


def get_weather(city: str, days: int = 1) -> str:
    """The weather of a place.

    Args:
        city: its name
        days: from today

    Returns:
        A sentence.
    """
    return f"{city}: rain for {days} days"


@pytest.fixture(scope="module")
def ollama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("ollama")
    special = ("<think>", "</think>", "<tool_call>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    with made_server(folder, chat_template=TEMPLATE, special_tokens=special, max_model_len=1024) as live:
        yield live


@pytest.fixture
def live(ollama_server: LiveServer) -> LiveServer:
    ollama_server.reset()
    return ollama_server


@pytest.fixture
def client(live: LiveServer) -> Iterator[ollama.Client]:
    with ollama.Client(live.url) as client:
        yield client


def lines(response: Response) -> list[dict[str, Any]]:
    """A stream's objects; the times are checked and left out."""
    assert response.status == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in response.text.splitlines()]
    for line in found:
        assert line.pop("created_at").endswith("Z")
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    figures = {name: found[-1].pop(name) for name in FIGURES}
    assert all(isinstance(figure, int) for figure in figures.values())
    assert all(figure > 0 for figure in figures.values())
    parts = sum(figures[f"{part}_duration"] for part in ("load", "prompt_eval", "eval"))
    assert parts <= figures["total_duration"] + 3
    return found


def prompt_of(live: LiveServer) -> str:
    return live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))


def joined(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a stream, with neighbours of one kind together: borders are the engine's."""
    found: list[dict[str, Any]] = []
    for piece in pieces:
        message = piece["message"]
        if found and message.keys() == found[-1].keys() and "tool_calls" not in message:
            for name in ("content", "thinking"):
                if name in message:
                    found[-1][name] += message[name]
        else:
            found.append(message)
    return found


def test_a_golden_stream(live: LiveServer) -> None:
    live.says(THOUGHT + TEXT + CALL)
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    found = lines(post(live, "/api/chat", {"model": "test/model", "messages": HELLO, "tools": tools}))
    assert {line["model"] for line in found} == {"test/model"}
    [thought, text, call, last] = joined(found)
    assert thought == {"role": "assistant", "content": "", "thinking": "Let me see."}
    assert text == {"role": "assistant", "content": TEXT}
    [told] = call.pop("tool_calls")
    assert call == {"role": "assistant", "content": ""}
    assert told.pop("id")
    assert told == {"function": {"index": 0, "name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}}
    assert last == {"role": "assistant", "content": ""}
    assert found[-1]["done_reason"] == "stop"


def test_a_golden_stream_of_a_text(live: LiveServer) -> None:
    live.says(TEXT)
    found = lines(post(live, "/api/generate", {"model": "alias:latest", "prompt": "Hello"}))
    assert "".join(line["response"] for line in found) == TEXT
    assert all(line.keys() == {"model", "response", "done"} for line in found[:-1])
    last = found[-1]
    ids = prompt_ids(live.scheduler.added[-1]) + live.tokenizer.encode(TEXT + "<|im_end|>", add_special_tokens=False)
    expected = {"model": "alias:latest", "response": "", "done": True, "done_reason": "stop", "context": ids}
    assert last == expected


@pytest.mark.parametrize("type_", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_body_without_its_type(live: LiveServer, type_: str) -> None:
    body = json.dumps({"model": "alias", "prompt": "Hello", "stream": False}).encode()
    assert send(live, "POST", "/api/generate", body, **{"Content-Type": type_}).json()["done"]
    foreign = send(live, "POST", "/api/generate", body, **{"Content-Type": type_, "Origin": "http://evil.example"})
    assert foreign.status == 403  # as any page could send it
    assert send(live, "POST", "/v1/completions", body, **{"Content-Type": type_}).status == 415


def test_whole_and_streamed(client: ollama.Client, live: LiveServer) -> None:
    live.says(THOUGHT + TEXT, num_cached_tokens=4)
    whole = client.chat("test/model", HELLO, think=True)
    assert (whole.message.thinking or "").strip() == "Let me see."
    assert whole.message.content == TEXT
    assert whole.done_reason == "stop"
    assert whole.eval_count == len(live.tokenizer.encode(THOUGHT + TEXT, add_special_tokens=False)) + 1
    pieces = list(client.chat("test/model:latest", HELLO, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == TEXT
    assert "".join(piece.message.thinking or "" for piece in pieces) == whole.message.thinking
    assert pieces[-1].prompt_eval_count == whole.prompt_eval_count == len(prompt_ids(live.scheduler.added[-1]))


def test_thinking_is_switched(client: ollama.Client, live: LiveServer) -> None:
    live.says(THOUGHT + TEXT)
    assert not client.chat("alias", HELLO, think=False).message.thinking
    assert prompt_of(live).endswith("<think>\n\n</think>\n\n")
    for think in (None, True, "low", "max"):
        assert client.chat("alias", HELLO, think=think).message.thinking
        assert prompt_of(live).endswith("assistant\n")
    assert client.generate("alias", "Hello", think=True).thinking
    with pytest.raises(ollama.ResponseError, match="think must be"):
        client.chat("alias", HELLO, think="enormously")


def test_a_loop_of_tools(client: ollama.Client, live: LiveServer) -> None:
    live.says(CALL + CALL)
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    said = client.chat("alias", messages, tools=[get_weather])
    assert '"name": "get_weather"' in prompt_of(live)
    assert said.message.tool_calls is not None
    assert [call.function.arguments for call in said.message.tool_calls] == [{"city": "Tromsø", "days": 2}] * 2
    messages.append(said.message)
    for call in said.message.tool_calls:
        result = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    live.says(TEXT)
    assert client.chat("alias", messages, tools=[get_weather]).message.content == TEXT
    prompt = prompt_of(live)
    first, second = "call00001", "call00002"  # the client drops ids
    assert f'<tool_call>get_weather {{"city": "Tromsø", "days": 2}} {first}</tool_call>' in prompt
    assert prompt.index(f"(get_weather {first})") < prompt.index(f"(get_weather {second})")
    streamed = list(client.chat("alias", messages, tools=[get_weather], stream=True))
    assert "".join(piece.message.content or "" for piece in streamed) == TEXT


def test_results_find_their_calls() -> None:
    """By id, else by name, else in order; each call has one result."""
    names = ["f", "g", "f", "g", "f"]
    calls = [{"id": f"c{i}", "function": {"name": name, "arguments": {}}} for i, name in enumerate(names)]
    results: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tool_call_id": "c2"}, {"tool_call_id": "c2", "name": "f"}),
        ({"tool_name": "g"}, {"tool_call_id": "c1", "name": "g"}),
        ({}, {"tool_call_id": "c0", "name": "f"}),
        ({"name": "f"}, {"tool_call_id": "c4", "name": "f"}),
        ({"name": "f"}, {"tool_call_id": "", "name": "f"}),
        ({"tool_call_id": "c2"}, {"tool_call_id": "c2"}),
        ({"tool_call_id": ["c3"]}, {"tool_call_id": ["c3"]}),
        ({"tool_name": ["g"]}, {"tool_call_id": "", "name": ["g"]}),
        ({}, {"tool_call_id": "c3", "name": "g"}),
        ({}, {"tool_call_id": ""}),
    ]
    given = [{"role": "tool", "content": "x", **result} for result, _ in results]
    made = chat_messages([{"role": "assistant", "tool_calls": calls}, *given], "m", None)
    assert made[1:] == [{"role": "tool", "content": "x", **told} for _, told in results]


def test_results_without_calls_cost_little() -> None:
    num_compared = 0

    class Id(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    calls = [{"function": {"name": "f"}}] * 500
    results = [{"role": "tool", "tool_call_id": Id("none")} for _ in range(500)]
    chat_messages([{"role": "assistant", "tool_calls": calls}, *results], "m", None)
    assert num_compared < 5000
    with pytest.raises(InvalidParameter, match="at most 4096 messages, got 5000"):
        chat_messages(HELLO * 5000, "m", None)


def test_a_call_that_is_cut_is_not_told_of(client: ollama.Client, live: LiveServer) -> None:
    live.says(CALL[:-30])
    for limit in (20, 26):
        said = client.chat("alias", HELLO, tools=[get_weather], options={"num_predict": limit})
        assert not said.message.tool_calls
        assert said.done_reason == "length"


async def test_the_async_client(live: LiveServer) -> None:
    live.says(TEXT, delay=0.001)
    client: Any = ollama.AsyncClient(live.url)

    async def streamed() -> str:
        pieces = [piece async for piece in await client.chat("alias", HELLO, stream=True)]
        return "".join(piece.message.content or "" for piece in pieces)

    assert list(await asyncio.gather(streamed(), streamed())) == [TEXT, TEXT]
    assert (await client.generate("alias", "Hello")).response == TEXT
    assert (await client.list()).models[0].model == "test/model:latest"
    with pytest.raises(ollama.ResponseError, match="not found"):
        await client.chat("other", HELLO)
    await client.close()


def test_options(client: ollama.Client, live: LiveServer) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 3.0, "top_p": 0.8, "min_p": 0.1, "repeat_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "seed": 5, "stop": ["###"], "num_ctx": 256, "num_gpu": 1,
    }  # fmt: skip
    client.chat("alias", HELLO, options=options)
    sampling = live.scheduler.added[-1].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 3, 5)
    told = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    assert told == pytest.approx((0.5, 0.8, 0.1, 1.2))
    assert (sampling.presence_penalty, sampling.frequency_penalty) == pytest.approx((0.3, 0.4))
    answer = post(live, "/api/chat", {"messages": HELLO, "options": options | {"mirostat_tau": 5.0, "magic": 1}})
    warned = answer.headers["x-penstock-warning"]
    assert "options.num_gpu: no effect" in warned
    assert "options.magic: an unknown option" in warned
    assert "mirostat" not in warned
    client.chat("alias", HELLO, options={"num_predict": -1, "seed": -1, "num_ctx": 128})
    request = live.scheduler.added[-1]
    assert request.sampling.max_tokens == 128 - len(prompt_ids(request))


def test_a_long_conversation_loses_its_oldest_turns(client: ollama.Client, live: LiveServer) -> None:
    turns = [{"role": role, "content": f"{role} {i} " * 6} for i in range(8) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "Be brief."}, *turns, *HELLO]
    client.chat("alias", messages, options={"num_ctx": 200})
    prompt = prompt_of(live)
    assert "Be brief." in prompt
    assert "user 0" not in prompt
    assert prompt.endswith("user\nHello<|im_end|>\n<|im_start|>assistant\n")
    refused = post(live, "/api/chat", {"messages": messages, "truncate": False, "options": {"num_ctx": 200}})
    assert refused.status == 400
    assert "the context length is 200 tokens" in refused.json()["error"]


def test_formats(client: ollama.Client, live: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for wanted in ("json", schema):
        client.chat("alias", HELLO, format=wanted)
        assert live.scheduler.added[-1].sampling.grammar
    client.chat("alias", HELLO, format="")
    assert not live.scheduler.added[-1].sampling.grammar


@pytest.mark.parametrize("text", ["[1, 2]", "[1, 1]"])
def test_a_schema_holds_for_the_content_alone(live: LiveServer, text: str) -> None:
    """Streamed or not, with the same result."""
    live.says(THOUGHT + text)
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    asked = {"model": "alias", "messages": HELLO, "format": schema}
    streamed = lines(post(live, "/api/chat", asked))[-1].get("schema_error", "")
    assert ("non-unique" in streamed) == (text == "[1, 1]")
    assert post(live, "/api/chat", asked | {"stream": False}).json().get("schema_error", "") == streamed


def test_logprobs(client: ollama.Client, live: LiveServer) -> None:
    live.says(TEXT)
    whole = client.generate("alias", "Hello", logprobs=True, top_logprobs=2).logprobs
    assert whole is not None
    assert "".join(token.token for token in whole).startswith(TEXT)
    assert all(len(token.top_logprobs or ()) == 2 for token in whole)
    pieces = client.chat("alias", HELLO, stream=True, logprobs=True)
    streamed = [token for piece in pieces for token in piece.logprobs or ()]
    assert [token.token for token in streamed] == [token.token for token in whole]
    assert all(token.top_logprobs is None for token in streamed)


def test_generating(client: ollama.Client, live: LiveServer) -> None:
    client.generate("alias", "Hello", system="Be brief.")
    assert prompt_of(live).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")
    live.says(TEXT)
    first = client.generate("alias", "Hello")
    assert first.context is not None
    client.generate("alias", "And?", context=first.context)
    ids = prompt_ids(live.scheduler.added[-1])
    assert ids[: len(first.context)] == list(first.context)
    assert prompt_of(live).count("<|im_start|>user") == 2
    raw = client.generate("alias", "Water", raw=True)
    assert (prompt_of(live), raw.context) == ("Water", None)
    client.generate("alias", "def f(", suffix="return x")
    assert prompt_of(live) == "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>"
    for fields in (
        {"raw": True, "system": "x"}, {"suffix": "x", "context": [1]}, {"template": "{{ .Prompt }}"},
        {"images": ["aGk="]}, {"width": 5},
    ):  # fmt: skip
        assert post(live, "/api/generate", {"model": "alias", "prompt": "Hello"} | fields).status == 400


@pytest.mark.parametrize("keep_alive", [None, 0, "5m", -1])
def test_asking_for_nothing_but_the_model(client: ollama.Client, live: LiveServer, keep_alive: Any) -> None:
    reason = "unload" if keep_alive == 0 else "load"
    assert client.generate("alias", keep_alive=keep_alive).done_reason == reason
    assert client.chat("alias", keep_alive=keep_alive).done_reason == reason
    assert not live.scheduler.added


def test_what_is_told_of_the_model(client: ollama.Client, live: LiveServer) -> None:
    assert [model.model for model in client.list().models] == ["test/model:latest", "alias:latest"]
    [running] = client.ps().models
    assert (running.name, running.context_length) == ("test/model:latest", 1024)
    assert running.expires_at is not None
    shown = client.show("alias")
    assert shown.capabilities == ["completion", "tools", "insert", "thinking", "embedding"]
    assert shown.template == TEMPLATE
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 1024
    assert shown.details is not None
    assert shown.details.family == "llama"
    assert "temperature" in (shown.parameters or "")
    for path in ("/", "/api/tags", "/api/version"):  # how clients ask whether it is there
        assert send(live, "HEAD", path).status == 200
    of_ollama = {"Host": "localhost:11434"}
    for headers in ({"User-Agent": "ollama/0.12.0 (amd64 linux)"}, of_ollama, {"Accept": "text/plain"}):
        answer = send(live, "GET", "/", None, **headers)
        assert (answer.text, answer.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
        assert send(live, "HEAD", "/", None, **headers).status == 200
    assert "routes" in send(live, "GET", "/", None, **of_ollama, Accept="application/json").json()
    assert send(live, "GET", "/", None, **of_ollama, Accept="text/html").text.startswith("<!doctype html>")
    version = get(live, "/api/version").json()["version"]
    assert all(part.isdigit() for part in version.split("."))  # Open WebUI compares them


def test_managing_models(client: ollama.Client) -> None:
    assert client.pull("alias").status == "success"
    assert [told.status for told in client.pull("alias:latest", stream=True)] == ["pulling manifest", "success"]
    refused: list[Callable[[], Any]] = [
        lambda: client.pull("other"),
        lambda: client.push("alias"),
        lambda: client.create("other", from_="alias"),
        lambda: client.copy("alias", "other"),
        lambda: client.delete("alias"),
    ]
    for ask in refused:
        with pytest.raises(ollama.ResponseError, match="started with"):
            ask()


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "model 'other' not found"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "does not support images"),
        ({"options": {"top_k": "x"}}, 400, "options.top_k"),
        ({"options": {"top_a": 0.5}}, 400, "options.top_a is not supported"),
        ({"options": {"mirostat": 3}}, 400, "mirostat must be between 0 and 2"),
        ({"options": {"num_predict": 0}}, 400, "num_predict must be"),
        ({"options": {"num_ctx": 0}}, 400, "num_ctx must be"),
        ({"template": "x"}, 400, "template is not supported"),
        ({"format": "xml"}, 400, "format must be"),
        ({"messages": [{"role": "user", "tool_calls": {"a": 1}}]}, 400, "expected a list"),
        ({"messages": "x"}, 400, "messages"),
        ({"messages": None, "tools": [None]}, 400, "tools[0]"),
    ],
)
def test_refusals(live: LiveServer, fields: dict[str, Any], status: int, message: str) -> None:
    answer = post(live, "/api/chat", {"model": "alias", "messages": HELLO} | fields)
    assert answer.status == status
    [error] = answer.json().values()
    assert message in error


def test_a_failure_in_the_middle(client: ollama.Client, live: LiveServer) -> None:
    ids = live.tokenizer.encode(TEXT, add_special_tokens=False)
    live.plays(lambda request, sequence: Script(ids, error="the device burns", delay=0.01))
    said: list[str] = []
    with pytest.raises(ollama.ResponseError, match="the device burns"):
        said.extend(piece.message.content or "" for piece in client.chat("alias", HELLO, stream=True))
    assert TEXT.startswith("".join(said))


def test_silence_does_not_disturb_clients(
    client: ollama.Client, live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first token a stream shows that it lives, with a byte that readers of lines skip."""
    monkeypatch.setattr("penstock.frontend.api.run.FIRST_TOKEN_WAIT_SECONDS", 0.001)
    live.says(TEXT, delay=0.02)
    assert post(live, "/api/chat", {"messages": HELLO}).text.startswith(' {"model"')
    pieces = list(client.chat("alias", HELLO, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == TEXT


OPEN_WEBUI: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"model": "test/model:latest", "messages": HELLO, "stream": True, "options": {}, "keep_alive": "5m"}),
    (
        "/api/chat",
        {
            "model": "alias:latest",
            "stream": True,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
                ]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
            "options": {"temperature": 0.6, "num_predict": 20, "repeat_last_n": -1, "num_thread": 4, "mirostat": 0},
            "format": "json",
            "think": False,
        },
    ),
    ("/api/generate", {"model": "alias:latest", "prompt": "", "keep_alive": 0}),
    ("/api/generate", {"model": "alias:latest", "prompt": "Hello", "stream": False}),
    ("/api/show", {"name": "alias:latest", "model": "alias:latest"}),
    ("/api/pull", {"name": "alias:latest", "model": "alias:latest", "insecure": True}),
]  # fmt: skip
"""As its backend sends them."""


@pytest.mark.parametrize(("path", "body"), OPEN_WEBUI)
def test_open_webui(live: LiveServer, path: str, body: dict[str, Any]) -> None:
    names = {model["model"] for model in get(live, "/api/tags").json()["models"]}
    assert body["model"] in names  # it asks only for these
    answer = post(live, path, body, **{"X-OpenWebUI-User-Name": "a", "Authorization": "Bearer any"})
    assert answer.status == 200
    for line in answer.text.splitlines():
        assert "error" not in json.loads(line)


def vector_of(request: AddRequest) -> bytes:
    """Numbers that show what came to the engine."""
    pooling = request.sampling.pooling
    assert pooling is not None
    return struct.pack("<4f", len(prompt_ids(request)), prompt_ids(request)[0], pooling.size, pooling.is_normalized)


def test_embeddings(client: ollama.Client, live: LiveServer) -> None:
    live.plays(lambda request, _: Script([0], pooled=vector_of(request)))
    texts = ["Water", "runs down the pipe"]
    ids = [live.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    whole = client.embed("alias:latest", texts)
    assert [list(vector) for vector in whole.embeddings] == [[len(each), each[0], 0, 1] for each in ids]
    assert whole.prompt_eval_count == sum(map(len, ids))
    assert whole.model == "alias:latest"
    assert (whole.total_duration or 0) > 0
    for text in (texts[1], texts[1] * 9):  # the longer one has more bytes than three tokens can
        [one] = client.embed("alias", text, options={"num_ctx": 3}).embeddings
        assert list(one) == [3, ids[1][0], 0, 1]
    assert client.embed("alias", "").embeddings == client.embed("alias", []).embeddings == []
    assert list(client.embeddings("alias", texts[0]).embedding) == [len(ids[0]), ids[0][0], 0, 0]
    assert client.embeddings("alias", "").embedding == []
    with pytest.raises(ollama.ResponseError, match="the context length is"):
        client.embed("alias", "x y z " * 2000, truncate=False)
    with pytest.raises(ollama.ResponseError, match="the context length is 3 tokens"):
        client.embed("alias", texts[1], truncate=False, options={"num_ctx": 3})
    told = post(live, "/api/embed", {"input": "x", "options": {"num_ctx": 9999}})
    assert "options.num_ctx: 1024 instead of 9999" in told.headers["x-penstock-warning"]
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.embed("other", "x")
    with pytest.raises(ollama.ResponseError, match="num_ctx must be"):
        client.embed("alias", "x", options={"num_ctx": 0})
