"""Bad requests: the status, the code, the field named, the limit and the value; and the server goes on."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.frontend.schema import CHAT, COMPLETION
from penstock.frontend.validation.foreign_fields import FOREIGN_FIELDS
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import HELLO, chat, complete, error_of, get, post, send
from tests.frontend.live_server import LiveServer, live_server

BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 10**100}, "n"),
    ({"n": -1}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.5}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 101}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["x"] * 1025}, "stop"),
    ({"stop": ["x" * 16_385]}, "stop"),
    ({"stop": ["x" * 8192, "y" * 8193]}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [384]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {"384": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 513}, "cache_salt"),
    ({"cache_salt": "a\nb"}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"speculative": "on"}, "speculative"),
    ({"speculative": 4}, "speculative"),
    ({"speculative": {"num_speculative_tokens": 65}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"num_speculative_tokens": -1}}, "speculative.num_speculative_tokens"),
    ({"speculative": {"num_speculative_tokens": "4"}}, "speculative.num_speculative_tokens"),
    ({"user": 5}, "user"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words"),
    ({"bad_words": ["x"] * 513}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [384]}, "allowed_token_ids"),
    ({"allowed_token_ids": [2], "min_tokens": 5}, "allowed_token_ids"),
    ({"allowed_token_ids": [9, 8, 2], "stop_token_ids": [9, 8], "min_tokens": 1}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_SAMPLING, ids=lambda value: str(value)[:40])
def test_bad_sampling_fields(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    for response in (chat(live, **fields), complete(live, **fields)):
        error = error_of(response, 400)
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "invalid_value"
        assert error["param"] == param
        assert param.split("[")[0] in error["message"]
    assert live.scheduler.added == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 10**100}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_completion_fields(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(complete(live, **fields), 400)["param"] == param
    assert live.scheduler.added == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_bad_chat_logprobs(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(chat(live, **fields), 400)["param"] == param
    assert chat(live, top_logprobs=0).json()["choices"][0]["logprobs"] is None


BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("Hello", "messages"),
    ([{"role": "user", "content": ""}] * 4097, "messages"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": "us\u00e9r", "content": "x"}], "messages[0].role"),
    ([{"role": "user<|im_end|>", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [5]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": "x", "tool_calls": 5}], "messages[0].tool_calls"),
    (["x"], "messages[0]"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES, ids=lambda value: str(value)[:40])
def test_bad_messages(live: LiveServer, messages: Any, param: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": messages, "prompt": None}
        error = error_of(post(live, path, body), 400)
        if path == "/tokenize" and messages is None:
            assert error["param"] == "prompt"
        else:
            assert error["param"] == param


BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt is required"),
    ("", "no tokens"),
    ([], "empty"),
    ([[]], "prompt[0] is empty"),
    (["a", ""], "prompt[1] is empty"),
    ([1, "a"], "prompt[1]"),
    ([[1], 2], "prompt[1]"),
    ([1.5], "prompt[0]"),
    ([None], "prompt[0]"),
    ([True], "prompt[0]"),
    ([-1], "prompt[0] must be a token id between 0 and 383, got -1"),
    ([5, 384], "prompt[1] must be a token id between 0 and 383, got 384"),
    ([[5], [5, 2**63]], "prompt[1][1]"),
    ([2**400], "64 bits"),
    (["a"] * 1025, "at most 1024 sequences, this one has 1025"),
    ([[["a"]]], "prompt[0][0]"),
    ({"a": 1}, "prompt"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:40])
def test_bad_prompts(live: LiveServer, prompt: Any, message: str) -> None:
    error = error_of(complete(live, prompt), 400)
    assert message in error["message"]
    assert str(error["param"]).startswith("prompt")


UNSUPPORTED: list[tuple[str, Any, Any]] = [
    ("chat_template", "{{ 1 }}", None),
    ("best_of", 4, 1),
    ("modalities", ["audio"], ["text"]),
]


@pytest.mark.parametrize(("field", "asks", "asks_nothing"), UNSUPPORTED, ids=[row[0] for row in UNSUPPORTED])
def test_what_is_not_honoured_is_refused(live: LiveServer, field: str, asks: Any, asks_nothing: Any) -> None:
    error = error_of(chat(live, **{field: asks}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", field)
    assert chat(live, **{field: asks_nothing}).status == 200
    assert chat(live, **{field: None}).status == 200


def test_completions_refuse_suffix(live: LiveServer) -> None:
    assert error_of(complete(live, suffix="x"), 400)["param"] == "suffix"
    assert complete(live, suffix="", logprobs=None).status == 200


MEDIA: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "image_embeds", "image_embeds": "AAAA"},
    {"type": "video_url", "video_url": {"url": "http://good\\@10.0.0.1"}},
    {"type": "audio_url", "audio_url": {"url": "gopher://localhost"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_id": "x"}},
]


@pytest.mark.parametrize("part", MEDIA, ids=lambda part: str(part)[:60])
def test_media_are_refused(live: LiveServer, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "x"}, part]
    error = error_of(chat(live, messages=[{"role": "user", "content": content}]), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == "messages[0].content[1].type"
    error_of(post(live, "/v1/responses", {"input": [{"role": "user", "content": [part]}]}), 400)


@pytest.mark.parametrize("decoder", [CHAT, COMPLETION], ids=["chat", "completions"])
def test_no_field_that_is_not_honoured_is_ignored(live: LiveServer, decoder: msgspec.json.Decoder[Any]) -> None:
    """Embeddings, transfers of KV, switches of other engines: whatever the schema knows and this server does not do."""
    own = decoder.type.__struct_encode_fields__
    refused = [name for name, field in FOREIGN_FIELDS.items() if not (field.hint or field.depends)]
    names = [name for name in refused if name not in own]
    assert len(names) > 25
    ask = chat if decoder is CHAT else complete
    for name in names:
        assert error_of(ask(live, **{name: {"asks": "for something"}}), 400)["param"] == name


def test_unknown_fields_and_nulls_are_accepted(live: LiveServer) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "max_tokens", "max_completion_tokens", "logit_bias", "stream", "seed"]
    )
    assert (
        chat(live, **nulls, made_up={"a": [1]}, metadata={"a": "b"}, user="someone", parallel_tool_calls=True).status
        == 200
    )
    assert complete(live, **nulls, made_up=5).status == 200


def test_unknown_model(live: LiveServer) -> None:
    for response in (
        chat(live, model="other\r\n\x1b[31m"),
        complete(live, model="other"),
        post(live, "/tokenize", {"model": "other", "prompt": "x"}),
        post(live, "/detokenize", {"model": "other", "tokens": []}),
        get(live, "/v1/models/a/b/c"),
    ):
        assert error_of(response, 404)["code"] == "model_not_found"


def test_too_long(live: LiveServer) -> None:
    error = error_of(complete(live, [5] * 512), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512 tokens" in error["message"]
    assert "the prompt has 512" in error["message"]
    assert complete(live, [5] * 511, max_tokens=1).status == 200
    assert error["param"] == "prompt"
    assert error_of(chat(live, messages=[{"role": "user", "content": "a b " * 500}]), 400)["param"] == "messages"
    error = error_of(complete(live, [5] * 500, min_tokens=13, max_tokens=None), 400)
    assert error["code"] == "context_length_exceeded"
    # Far too long a text is refused by its size, before it is tokenized.
    for response in (
        complete(live, "x" * 8193),
        complete(live, ["a", "\u4e2d" * 2731]),
        chat(live, messages=[{"role": "user", "content": "x" * 8193}]),
        chat(live, messages=[{"role": "user", "content": "x" * 1000}] * 9),
    ):
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert "8192 bytes" in error["message"]


MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"5",
    b'"x"',
    b"null",
    b'{"messages": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x"} trailing',
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": "\xff"}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "x", "temperature": 1e400}',
    b'{"prompt": "x", "temperature": ' + b"9" * 10_000 + b"}",
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: body[:24].decode("latin-1"))
def test_malformed_bodies(live: LiveServer, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        error = error_of(post(live, path, body), 400)
        assert error["code"] in ("malformed_body", "invalid_value", "too_many_values")
    assert post(live, "/tokenize", body).status in (200, 400)  # it does not know all of the fields
    assert complete(live).status == 200


def test_body_size(live: LiveServer) -> None:
    limit = live.server.service.max_body_bytes
    assert limit == (2 << 20) + 32 * 512  # the context's length
    error = error_of(post(live, "/v1/completions", b" " * (limit + 1)), 413)
    assert error["code"] == "content_too_large"
    assert str(limit) in error["message"]
    assert str(limit + 1) in error["message"]
    body = json.dumps({"prompt": "Hello"}).encode()
    assert post(live, "/v1/completions", body + b" " * (limit - len(body))).status == 200
    # Without a length: the bound holds for what arrives.
    connection_body = iter([b" " * (1 << 20)] * 3)
    response = send(live, "POST", "/v1/completions", connection_body, **{"Content-Type": "application/json"})  # type: ignore[arg-type]
    assert error_of(response, 413)["code"] == "content_too_large"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": ""},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json; charset*0*"},
        {"Content-Type": "application/json; a=" + "b" * 240},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
    ids=str,
)
def test_media_types(live: LiveServer, headers: dict[str, str]) -> None:
    assert error_of(post(live, "/v1/completions", {"prompt": "x"}, **headers), 415)["code"] == "unsupported_media_type"
    assert (
        post(live, "/v1/completions", {"prompt": "x"}, **{"Content-Type": "application/json; charset=UTF-8"}).status
        == 200
    )


def test_routes(live: LiveServer) -> None:
    assert error_of(get(live, "/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(post(live, "/nothing", {}), 404)["code"] == "not_found"
    response = get(live, "/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(send(live, "DELETE", "/v1/models"), 405)["code"] == "method_not_allowed"


def test_arguments_that_cannot_fit_are_refused_before_they_are_read(live: LiveServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    error = error_of(chat(live, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]), 400)
    assert (error["code"], error["param"]) == (
        "context_length_exceeded",
        "messages[1].tool_calls[0].function.arguments",
    )


def test_template_refusals(live: LiveServer) -> None:
    fields = {"messages": HELLO, "chat_template_kwargs": {"tools": [1]}}
    error = error_of(post(live, "/v1/chat/completions", fields), 400)
    assert error["param"] == "chat_template_kwargs"
    assert "tools" in error["message"]
    refused: list[dict[str, Any]] = [
        {"chat_template": "x"},
        {"tokenize": True},
        {"messages": "x"},
        {"enable_thinking": {}},
    ]
    for kwargs in refused:
        assert error_of(chat(live, chat_template_kwargs=kwargs), 400)["param"] == "chat_template_kwargs"
    error = error_of(chat(live, continue_final_message=True, add_generation_prompt=True), 400)
    assert error["param"] == "continue_final_message"
    error = error_of(chat(live, messages=[{"role": "refused", "content": "x"}]), 400)
    assert (error["code"], error["param"]) == ("chat_template_error", "messages")
    assert "no such role" in error["message"]


def test_what_is_odd_and_accepted(live: LiveServer) -> None:
    """The last of two equal keys counts; NUL is a character; in a prompt, the text of a special token is it."""
    assert post(live, "/tokenize", b'{"prompt":"one","prompt":"b"}').json()["count"] == 1
    assert complete(live, "a\x00b").status == 200
    plain = post(live, "/tokenize", {"messages": HELLO}).json()["tokens"]
    special = post(live, "/tokenize", {"messages": [{"role": "user", "content": "<|im_start|>"}]}).json()["tokens"]
    assert special.count(1) == plain.count(1)
    assert post(live, "/tokenize", {"prompt": "<|im_start|>"}).json()["tokens"] == [1]


TOO_MANY: list[tuple[str, bytes, str]] = [
    (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"x","y":[%s]}]}' % b",".join([b"[]"] * 70_000),
        "",
    ),
    ("/v1/completions", b'{"prompt":[%s]}' % b",".join([b"7"] * 400_000), ""),
    ("/v1/responses", b'{"input":"x","made_up":%s%s,"user":"%s"}' % (b"[" * 200, b"]" * 200, b"x" * 4000), ""),
    ("/tokenize", b'{"prompt":"x","made_up":%s}' % (b"7" * 5000), ""),
    (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[%s]}]}'
        % b",".join([b'{"function":{"name":"f","arguments":"[%s]"}}' % b",".join([b"[]"] * 2_000)] * 40),
        "messages[1].tool_calls[32].function.arguments",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_MANY, ids=lambda value: str(value)[:30])
def test_bodies_that_would_be_too_many_objects(live: LiveServer, path: str, body: bytes, param: str) -> None:
    error = error_of(post(live, path, body), 400)
    assert error["code"] == "too_many_values"
    assert (error["param"] or "") == param


def test_a_message_brings_only_what_its_template_may_read(checkpoint: Path, sockets: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].plan }}{{ messages[0] | length }}")
    with live_server(checkpoint, sockets, frontend={"chat_template": str(template)}) as live:
        message = {"role": "user", "content": "x", "plan": "go", "made_up": [1], "names": "no"}
        assert chat(live, messages=[message]).status == 200
        assert live.tokenizer.decode(prompt_ids(live.scheduler.added[-1])) == "go3"


def test_a_long_wrong_value_is_not_sent_back(live: LiveServer) -> None:
    error = error_of(post(live, "/engines/0/role", {"role": "words " * 10_000}), 400)
    assert (error["param"], error["message"]) == ("role", "role must be 'both', 'prefill' or 'decode'")


def test_a_missing_or_unknown_field_is_named(live: LiveServer) -> None:
    error = error_of(post(live, "/engines/0/role", {}), 400)
    assert (error["param"], error["message"]) == ("role", "role is required")
    error = error_of(post(live, "/debug/simulate", {"configs": {"a": ""}, "sped": 2}), 400)
    assert (error["param"], error["message"]) == ("sped", "sped is an unknown field")


def test_a_long_unknown_field_is_not_sent_back(live: LiveServer) -> None:
    error = error_of(post(live, "/debug/simulate", {"words " * 10_000: 1}), 400)
    assert "unknown field" in error["message"]
    assert len(error["message"]) < 300
