"""What reaches the scheduler, and the shapes of whole answers."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.ipc.messages import SamplingParams
from tests.frontend.fake_scheduler import Script, prompt_ids
from tests.frontend.http_client import HELLO, chat, complete, completion_text, error_of, events, get, post
from tests.frontend.live_server import LiveServer


def ids_of(live: LiveServer, text: str) -> list[int]:
    return live.tokenizer.encode(text, add_special_tokens=False)


def sampling_of(live: LiveServer) -> SamplingParams:
    return live.scheduler.added[-1].sampling


def test_defaults_come_from_the_generation_config(live: LiveServer) -> None:
    chat(live, seed=7)
    num_prompt = len(prompt_ids(live.scheduler.added[-1]))
    assert sampling_of(live) == SamplingParams(
        max_tokens=512 - num_prompt, temperature=0.7, top_p=0.9, top_k=20, seed=7, stop_token_ids=(2, 0)
    )
    complete(live, seed=7)
    assert sampling_of(live).max_tokens == 16


def test_an_end_token_that_the_model_cannot_draw_is_left_out(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may have more tokens than the output matrix has rows, which ends requests with `min_tokens`."""
    service = live.server.service
    known = service.model.eos_token_ids
    monkeypatch.setattr(service, "model", replace(service.model, eos_token_ids=(*known, 1 << 20)))
    assert complete(live, "Hello", min_tokens=2).status == 200
    assert sampling_of(live).stop_token_ids == known


def test_every_field_arrives(live: LiveServer) -> None:
    chat(
        live,
        n=2,
        max_completion_tokens=9,
        max_tokens=5,
        min_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=1,
        logit_bias={"5": -100, "007": 2.5},
        seed=-2,
        stop_token_ids=[9, 2, 9],
        priority=-3,
        cache_salt="tenant a",
        speculative={"num_speculative_tokens": 2},
    )
    [request] = live.scheduler.added
    assert (request.n, request.priority, request.cache_salt) == (2, -3, "tenant a")
    assert request.sampling == SamplingParams(
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=1.0,
        logit_bias=((5, -100.0), (7, 2.5)),
        seed=2**63 - 2,
        stop_token_ids=(2, 0, 9),
        max_drafts=2,
    )


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": -0.0}, "temperature", 0.0),
        ({"temperature": 5e-324}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": 10**9}, "top_k", 0),
        ({"ignore_eos": True}, "stop_token_ids", ()),
        ({"ignore_eos": True, "stop_token_ids": [9]}, "stop_token_ids", (9,)),
        ({"min_tokens": 30}, "max_tokens", 30),
    ],
)
def test_neutral_values(live: LiveServer, fields: dict[str, Any], name: str, value: object) -> None:
    complete(live, **fields)
    assert getattr(sampling_of(live), name) == value


@pytest.mark.parametrize(
    ("speculative", "most"),
    [
        (None, -1),
        (True, -1),
        (False, 0),
        ({}, -1),
        ({"num_speculative_tokens": None}, -1),
        ({"num_speculative_tokens": 0}, 0),
        ({"num_speculative_tokens": 64}, 64),
    ],
)
def test_how_much_is_guessed_is_the_same_field_everywhere(live: LiveServer, speculative: Any, most: int) -> None:
    chat(live, speculative=speculative)
    complete(live, speculative=speculative)
    post(live, "/v1/responses", {"input": "Hi", "speculative": speculative})
    assert [request.sampling.max_drafts for request in live.scheduler.added] == [most] * 3


def test_seeds_differ_unless_given(live: LiveServer) -> None:
    for _ in range(3):
        complete(live)
    seeds = {request.sampling.seed for request in live.scheduler.added}
    assert len(seeds) == 3
    assert len({request.request_id for request in live.scheduler.added}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_kinds(live: LiveServer, stream: bool) -> None:
    hello, water = ids_of(live, "Hello world"), ids_of(live, "Water runs")
    for prompt, expected in (
        ("Hello world", ["Hello world"]),
        (["Hello world"], ["Hello world"]),
        (["Hello world", "Water runs"], ["Hello world", "Water runs"]),
        (hello, ["Hello world"]),
        ([hello, water], ["Hello world", "Water runs"]),
    ):
        response = complete(live, prompt, stream=stream)
        if stream:
            found = events(response)
            assert [completion_text(found, i) for i in range(len(expected))] == expected
        else:
            assert [choice["text"] for choice in response.json()["choices"]] == expected
        sent = [prompt_ids(request) for request in live.scheduler.added[-len(expected) :]]
        assert sent == [ids_of(live, text) for text in expected]


def test_several_prompts_times_n(live: LiveServer) -> None:
    a, b = ids_of(live, " a"), ids_of(live, " b")
    live.plays(lambda request, i: Script([*prompt_ids(request), *(a if i == 0 else b)], num_cached_tokens=1))
    answer = complete(live, ["Hello", "Water"], n=2).json()
    num_output = 4 * (1 + 1) + 2 * (len(a) + len(b))  # each: one token of prompt, its own, the stop token
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["Hello a", "Hello b", "Water a", "Water b"]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": num_output,
        "total_tokens": 2 + num_output,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_echo(live: LiveServer) -> None:
    live.says(" runs")
    assert complete(live, "Water", echo=True).json()["choices"][0]["text"] == "Water runs"
    assert complete(live, ids_of(live, "Water"), echo=True).json()["choices"][0]["text"] == "Water runs"
    found = events(complete(live, ["Water", "Hello"], echo=True, stream=True))
    assert [completion_text(found, i) for i in range(2)] == ["Water runs", "Hello runs"]


def test_token_ids(live: LiveServer) -> None:
    ids = ids_of(live, "Water runs down")
    prompt = ids_of(live, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    live.gives(ids)
    answer = chat(live, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == [*ids, 2]
    assert chat(live).json()["choices"][0]["token_ids"] is None
    found = events(chat(live, return_token_ids=True, stream=True))[:-1]
    assert [event["prompt_token_ids"] for event in found if "prompt_token_ids" in event] == [prompt]
    assert [i for event in found for i in event["choices"][0].get("token_ids", [])] == [*ids, 2]
    answer = complete(live, "Hello", return_token_ids=True).json()["choices"][0]
    assert (answer["prompt_token_ids"], answer["token_ids"]) == (ids_of(live, "Hello"), [*ids, 2])
    found = events(complete(live, "Hello", return_token_ids=True, stream=True))[:-1]
    assert found[0]["choices"][0]["prompt_token_ids"] == ids_of(live, "Hello")
    assert [i for event in found for i in event["choices"][0].get("token_ids", [])] == [*ids, 2]


def test_stop_token_ids(live: LiveServer) -> None:
    ids = ids_of(live, "Water runs down the pipe")
    live.gives(ids)
    answer = complete(live, stop_token_ids=[ids[1]], return_token_ids=True).json()["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", ids[1])
    assert answer["token_ids"] == ids[:2]
    assert answer["text"] == live.tokenizer.decode(ids[:1])
    shown = complete(live, stop_token_ids=[ids[1]], include_stop_str_in_output=True).json()["choices"][0]
    assert shown["text"] == live.tokenizer.decode(ids[:2])
    eos = complete(live).json()["choices"][0]
    assert (eos["finish_reason"], eos["stop_reason"]) == ("stop", None)


def test_length_finish(live: LiveServer) -> None:
    live.says("Water runs down the pipe", per_step=3)
    answer = complete(live, max_tokens=2).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


def test_content_parts_roles_and_template_variables(live: LiveServer) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    chat(live, messages=[{"role": "developer", "content": "Be kind"}, {"role": "user", "content": parts}])
    text = live.tokenizer.decode(prompt_ids(live.scheduler.added[-1]))
    assert text == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHello\nworld<|im_end|>\n<|im_start|>assistant\n"
    )
    chat(live, chat_template_kwargs={"enable_thinking": False})
    assert live.tokenizer.decode(prompt_ids(live.scheduler.added[-1])).endswith("assistant\n<think></think>")
    chat(live, messages=[*HELLO, {"role": "assistant", "content": "Well"}], continue_final_message=True)
    assert live.tokenizer.decode(prompt_ids(live.scheduler.added[-1])).endswith("<|im_start|>assistant\nWell")


def test_tokenize_and_detokenize(live: LiveServer) -> None:
    ids = ids_of(live, "Hello world")
    answer = post(live, "/tokenize", {"prompt": "Hello world", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 512, "tokens": ids, "token_strs": ["Hello", "\u0120world"]}
    answer = post(live, "/tokenize", {"model": "test/model", "messages": HELLO}).json()
    assert live.tokenizer.decode(answer["tokens"]).endswith("<|im_start|>assistant\n")
    assert answer["token_strs"] is None
    answer = post(live, "/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()
    assert live.tokenizer.decode(answer["tokens"]).endswith("<|im_end|>\n")
    assert post(live, "/detokenize", {"tokens": ids}).json() == {"prompt": "Hello world"}
    assert post(live, "/detokenize", {"tokens": [1, *ids]}).json() == {"prompt": "<|im_start|>Hello world"}
    assert post(live, "/detokenize", {"tokens": [384]}).json()["error"]["param"] == "tokens"
    assert post(live, "/detokenize", {"tokens": [5] * 8192}).status == 200
    assert "at most 8192 ids" in post(live, "/detokenize", {"tokens": [5] * 8193}).json()["error"]["message"]


def test_models_version_health(live: LiveServer) -> None:
    card = get(live, "/v1/models/test/model").json()
    assert card["max_model_len"] == 512
    assert get(live, "/v1/models").json()["data"][0] == card
    assert get(live, "/v1/models/test%2Fmodel").json() == card
    assert set(get(live, "/version").json()) == {"version", "system", "system_fingerprint"}
    assert get(live, "/health").status == 200
    assert get(live, "/ready").json() == {"status": "ready"}


def test_request_ids(live: LiveServer) -> None:
    response = complete(live)
    assert response.headers["x-request-id"] in response.json()["id"]
    body = {"prompt": "Hello"}
    assert post(live, "/v1/completions", body, **{"x-request-id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
    assert post(live, "/v1/completions", body, **{"x-request-id": "abc-1.2_3"}).json()["id"] == "cmpl-abc-1.2_3"
    for bad in ("a b", "x" * 129, "\u00e9", "a\tb"):
        given = get(live, "/health", **{"x-request-id": bad}).headers["x-request-id"]
        assert len(given) == 32
    assert len(get(live, "/nowhere").headers["x-request-id"]) == 32
    streamed = post(live, "/v1/completions", body | {"stream": True}, **{"x-request-id": "s-1"})
    assert streamed.headers["x-request-id"] == "s-1"
    assert events(streamed)[0]["id"] == "cmpl-s-1"


def test_prompts_are_not_repeated_without_end(live: LiveServer) -> None:
    body = {"prompt": [[7] * 500] * 100, "n": 10, "max_tokens": 1, "echo": True, "return_token_ids": True}
    error = error_of(post(live, "/v1/completions", body), 400)
    assert str(1 << 19) in error["message"]
    assert "1000000" in error["message"]
