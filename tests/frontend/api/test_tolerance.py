"""What clients send to every server: accepted where it cannot change the answer, and said where it has no effect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.errors import InvalidParameter
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.validation.chat import settings_for
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import HELLO, Response, chat, complete, error_of, events, get, post, send
from tests.frontend.live_server import LiveServer, live_server, made_server

HEADER = "x-penstock-warning"
CONTEXT = 512  # of the shared server's engine


def prompt_text(live: LiveServer) -> str:
    return live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))


def template(reads: str) -> ChatTemplate:
    return ChatTemplate(f"{{{{ messages }}}}{{{{ {reads} }}}}", {})


@pytest.mark.parametrize(
    ("reads", "given", "settings", "warned"),
    [
        ("reasoning_effort", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, False),
        ("enable_thinking", {"reasoning_effort": "low"}, {"enable_thinking": True}, False),
        ("enable_thinking", {"reasoning_effort": "none"}, {"enable_thinking": False}, False),
        ("thinking", {"reasoning_effort": "none"}, {"thinking": False}, False),
        ("enable_thinking", {"reasoning_effort": "none", "enable_thinking": True}, {"enable_thinking": True}, False),
        ("mood", {"reasoning_effort": "high"}, {}, True),
        ("mood", {"enable_thinking": False}, {}, True),
        ("mood", {"mood": "good", "other": {"deep": 1}}, {"mood": "good"}, True),
        ("verbosity", {"verbosity": "low"}, {"verbosity": "low"}, False),
        ("mood", {"verbosity": "medium"}, {}, False),
        ("mood", {"verbosity": "low"}, {}, True),
    ],
)
def test_template_settings(reads: str, given: dict[str, Any], settings: dict[str, Any], warned: bool) -> None:
    found, warnings = settings_for(template(reads), given)
    assert found == settings
    assert bool(warnings) == warned


def test_an_effort_of_none_switches_thinking_off_where_both_are_read() -> None:
    both = template("reasoning_effort ~ enable_thinking")
    assert settings_for(both, {"reasoning_effort": "none"})[0] == {"reasoning_effort": "none", "enable_thinking": False}
    assert settings_for(both, {"reasoning_effort": "high"})[0] == {"reasoning_effort": "high"}


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "add_generation_prompt"])
def test_what_is_no_variable_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        settings_for(template("mood"), {name: "x"})


IDLE: list[tuple[dict[str, Any], str]] = [
    ({"reasoning_effort": "low"}, ""),  # the template can think, or not
    ({"chat_template_kwargs": {"custom": 1}}, "chat_template_kwargs.custom"),
    ({"verbosity": "low"}, "verbosity"),
    ({"verbosity": "medium"}, ""),
    ({"store": True}, "store"),
    ({"store": False}, ""),
    ({"service_tier": "auto"}, ""),
    ({"service_tier": "flex"}, "service_tier"),
    ({"speculative": True}, "speculative"),
    ({"speculative": {"num_speculative_tokens": 3, "method": "ngram"}}, "speculative"),
    ({"speculative": False}, ""),
    ({"speculative": {"num_speculative_tokens": 0}}, ""),
    ({"metadata": {"run": {"id": [1, None]}}}, ""),
    ({"safety_identifier": "a", "prompt_cache_key": "b", "prompt_cache_retention": "24h"}, ""),
]


@pytest.mark.parametrize(("fields", "warned"), IDLE, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_idle_fields(live: LiveServer, fields: dict[str, Any], warned: str, stream: bool) -> None:
    response = chat(live, stream=stream, **fields)
    assert response.status == 200, response.text
    told = response.headers.get(HEADER, "")
    assert told.startswith(f"{warned}: ") if warned else not told


def test_idle_fields_of_other_routes(live: LiveServer) -> None:
    assert HEADER not in complete(live, metadata={"a": {"b": 1}}, service_tier="default").headers
    response = post(
        live, "/v1/responses", {"input": "Hi", "reasoning": {"effort": "none"}, "text": {"verbosity": "low"}}
    )
    assert response.status == 200, response.text
    assert response.headers[HEADER].startswith("verbosity: ")
    assert "<think></think>" in prompt_text(live)
    response = post(live, "/tokenize", {"messages": HELLO, "chat_template_kwargs": {"custom": 1}})
    assert response.headers[HEADER].startswith("chat_template_kwargs.custom: ")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_output_than_the_context_has_room_for(live: LiveServer, field: str) -> None:
    response = chat(live, **{field: 32_000})
    assert response.status == 200
    added = live.scheduler.added[-1]
    room = CONTEXT - len(prompt_ids(added))
    assert added.sampling.max_tokens == room
    assert response.headers[HEADER] == f"{field}: {room} instead of 32000, because the context has no room for more"
    assert HEADER not in chat(live, **{field: room}).headers
    assert HEADER not in chat(live, **{field: -1}).headers
    assert live.scheduler.added[-1].sampling.max_tokens == room


def test_more_output_of_other_routes(live: LiveServer) -> None:
    assert complete(live, [5] * 500, max_tokens=13).headers[HEADER].startswith("max_tokens: 12 instead of 13")
    complete(live, [5] * 500, max_tokens=-1)
    assert live.scheduler.added[-1].sampling.max_tokens == 12
    response = post(live, "/v1/responses", {"input": "Hi", "max_output_tokens": 9999})
    assert response.headers[HEADER].startswith("max_output_tokens: ")
    # What is kept of a long prompt does not shrink to nothing for an output without bounds.
    complete(live, [5] * 600, max_tokens=9999, truncate_prompt_tokens=-1)
    assert len(prompt_ids(live.scheduler.added[-1])) == CONTEXT - 1


def test_strict_requests(checkpoint: Path, sockets: Path) -> None:
    with live_server(checkpoint, sockets, frontend={"strict_requests": True}) as live:
        error = error_of(complete(live, [5] * 500, max_tokens=13), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert "513 were requested" in error["message"]
        for fields, param in (({"store": True}, "store"), ({"verbosity": "low"}, "verbosity")):
            error = error_of(chat(live, **fields), 400)
            assert (error["code"], error["param"]) == ("unsupported_parameter", param)
        assert chat(live).status == 200
        live.wait_until(lambda: len(live.server.service.generations) == 0)


def test_kept_parts_of_a_long_prompt(live: LiveServer) -> None:
    ids = list(range(5, 25))
    for side, kept in (("left", ids[-4:]), (None, ids[-4:]), ("right", ids[:4])):
        complete(live, ids, truncate_prompt_tokens=4, truncation_side=side)
        assert list(prompt_ids(live.scheduler.added[-1])) == kept
    assert error_of(complete(live, truncation_side="middle"), 400)["param"] == "truncation_side"
    assert error_of(complete(live, logprob_token_ids=[1]), 400)["param"] == "logprob_token_ids"


def test_parts_of_other_names(live: LiveServer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}], "refusal": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Three", "annotations": []}]},
        {"role": "user", "content": "Go on"},
    ]
    assert chat(live, messages=messages).status == 200
    assert prompt_text(live).count("<|im_start|>") == 5
    assert "One\ntwo" in prompt_text(live)
    assert "I will not." in prompt_text(live)
    for part, field in (
        ({"type": "refusal"}, "refusal"),
        ({"type": "image_url"}, "type"),
        ({"type": ["text"]}, "type"),
    ):
        error = error_of(chat(live, messages=[{"role": "user", "content": [part]}]), 400)
        assert error["param"] == f"messages[0].content[0].{field}"


def test_fingerprint_and_nulls(live: LiveServer) -> None:
    whole = chat(live).json()
    assert whole["system_fingerprint"].startswith("fp_")
    assert complete(live).json()["system_fingerprint"] == whole["system_fingerprint"]
    for ask in (chat, complete):
        found = events(ask(live, stream=True))[:-1]
        assert {event["system_fingerprint"] for event in found} == {whole["system_fingerprint"]}
    response = post(live, "/v1/responses", {"input": "Hi", "max_output_tokens": 16}).json()
    assert response["system_fingerprint"] == whole["system_fingerprint"]
    version = get(live, "/version").json()
    assert version["system_fingerprint"] == whole["system_fingerprint"]
    assert set(version["system"]) >= {"weights", "kernels", "dtype", "ranks", "batch_invariant"}
    cards = get(live, "/v1/models").json()["data"]
    assert {card["system_fingerprint"] for card in cards} == {whole["system_fingerprint"]}
    assert (whole["prompt_logprobs"], whole["prompt_token_ids"]) == (None, None)
    assert whole["choices"][0]["message"]["reasoning"] is None


def test_usage_goes_on_from_the_first_chunk(live: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    first = events(chat(live, stream=True, stream_options=options))[0]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["usage"]["prompt_tokens"] > 3
    assert first["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/models/test/model", "/v1/models/test/model"),
        ("/v1/health", "/health"),
        ("/ping", "/health"),
    ],
)
def test_other_paths(live: LiveServer, path: str, canonical: str) -> None:
    assert get(live, path).json() == get(live, canonical).json()


def test_paths_without_a_version(live: LiveServer) -> None:
    assert post(live, "/chat/completions", {"messages": HELLO}).status == 200
    assert post(live, "/completions", {"prompt": "Hi"}).status == 200
    assert post(live, "/responses", {"input": "Hi"}).status == 200
    assert b'endpoint="/v1/completions"' in get(live, "/metrics/").content
    assert b'endpoint="/completions"' not in get(live, "/metrics").content


def test_the_first_page(live: LiveServer) -> None:
    routes = get(live, "/").json()["routes"]
    described = get(live, "/openapi.json").json()["paths"]
    for route in routes:
        method, path = route.split()
        assert method.lower() in described[path]


def test_no_answer_tells_versions(live: LiveServer) -> None:
    answers: list[Response] = [get(live, "/"), get(live, "/nothing"), chat(live), chat(live, stream=True)]
    answers += [send(live, "PUT", "/v1/models"), post(live, "/v1/completions", {"prompt": 5})]
    answers.append(send(live, "GET", "/health", None, **{"Content-Length": "x"}))
    for answer in answers:
        assert answer.headers["server"] == "penstock", answer


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    source = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{{ messages[0].content }}"
    with made_server(tmp_path_factory.mktemp("tokenize"), chat_template=source) as live:
        yield live


def test_tokenize_with_tools(tool_server: LiveServer) -> None:
    assert chat(tool_server, tools=TOOLS).status == 200
    tokens = post(tool_server, "/tokenize", {"messages": HELLO, "tools": TOOLS}).json()["tokens"]
    assert tokens == list(prompt_ids(tool_server.scheduler.added[-1]))
    assert tokens != post(tool_server, "/tokenize", {"messages": HELLO}).json()["tokens"]
    error = error_of(post(tool_server, "/tokenize", {"messages": HELLO, "tools": [{"type": "x"}]}), 400)
    assert error["param"] == "tools[0].type"
