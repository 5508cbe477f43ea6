"""What clients of other engines send, field by field and route by route: mapped, accepted, told or refused."""

from typing import Any

import msgspec
import pytest

from penstock.frontend.errors import InvalidParameter, UnsupportedParameter
from penstock.frontend.schema import ChatRequest, CompletionRequest
from penstock.frontend.schema_infill import InfillRequest
from penstock.frontend.validation.foreign_fields import FOREIGN_FIELDS, SYNONYMS, take_foreign_fields
from penstock.parts.anthropic.frontend.schema import MessagesRequest
from penstock.parts.ollama.frontend.options import Options, read_options
from penstock.parts.responses.frontend.schema import ResponsesRequest
from tests.frontend.fake_scheduler import prompt_ids
from tests.frontend.http_client import HELLO, Response, chat, complete, error_of, post
from tests.frontend.live_server import LiveServer

HEADER = "x-penstock-warning"
ROUTES: dict[str, type[msgspec.Struct]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "infill": InfillRequest,
    "ollama": Options,
}

OWN_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4, "stream_options": None},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/api/chat": {"messages": HELLO, "stream": False},
    "/tokenize": {"prompt": "Hello"},
}

MAPPED: list[tuple[str, Any, dict[str, tuple[str, Any]]]] = [
    (
        "n_predict",
        7,
        {"chat": ("max_tokens", 7), "completions": ("max_tokens", 7), "responses": ("max_tokens", 7)}
        | {"messages": ("max_tokens", 7), "infill": ("n_predict", None), "ollama": ("num_predict", 7)},
    ),
    ("max_new_tokens", 7.0, dict.fromkeys(("chat", "completions", "responses", "messages"), ("max_tokens", 7))),
    ("num_predict", -2, dict.fromkeys(("chat", "completions", "responses"), ("max_tokens", -1))),
    ("max_completion_tokens", 7, {"completions": ("max_tokens", 7), "messages": ("max_tokens", 7)}),
    ("max_output_tokens", 7, {"chat": ("max_tokens", 7)}),
    ("max_tokens", 7, {"ollama": ("num_predict", 7)}),
    ("min_new_tokens", 3, dict.fromkeys(("chat", "completions", "responses", "infill"), ("min_tokens", 3))),
    ("repeat_penalty", 1.2, dict.fromkeys(("chat", "responses", "messages", "ollama"), ("repetition_penalty", 1.2))),
    ("stop_sequences", ["a"], {"chat": ("stop", ["a"]), "completions": ("stop", ["a"])}),
    ("stopping_strings", ["a"], {"chat": ("stop", ["a"]), "messages": ("stop_sequences", ["a"])}),
    ("stop", "a", {"messages": ("stop_sequences", ["a"])}),
    ("random_seed", 5, dict.fromkeys(("chat", "completions", "responses", "messages", "ollama"), ("seed", 5))),
    ("no_stop_trim", True, {"chat": ("include_stop_str_in_output", True)}),
]


@pytest.mark.parametrize("path", OWN_FIELDS)
def test_a_body_with_own_fields_is_decoded_once(path: str, live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    monkeypatch.setattr("penstock.frontend.api.body.decode", lambda *_: decoded.append("again"))
    answer = post(live, path, OWN_FIELDS[path])
    assert answer.status == 200
    assert HEADER not in answer.headers
    assert not decoded


@pytest.mark.parametrize(("name", "value", "wanted"), MAPPED, ids=[row[0] for row in MAPPED])
def test_synonyms_are_mapped(name: str, value: Any, wanted: dict[str, tuple[str, Any]]) -> None:
    for route, (field, mapped) in wanted.items():
        request = ROUTES[route]()
        assert take_foreign_fields(request, {name: value}) == []
        assert getattr(request, field) == mapped, route


@pytest.mark.parametrize("names", SYNONYMS, ids=[group[0] for group in SYNONYMS])
def test_the_name_of_the_api_wins(names: tuple[str, ...]) -> None:
    for route, kind in ROUTES.items():
        own = [name for name in names if name in kind.__struct_encode_fields__]
        other = next((name for name in names if name not in own), None)
        if own and other is not None:
            value: Any = {"stop": "a", "stop_sequences": ["a"], "include_stop_str_in_output": True}.get(own[-1], 5)
            another: Any = {"stop": "b", "stop_sequences": ["b"], "include_stop_str_in_output": False}.get(own[-1], 6)
            request = kind(**{own[-1]: value})
            assert take_foreign_fields(request, {other: value}) == [], route
            [warning] = take_foreign_fields(request, {other: another})
            assert warning == f"{other}: ignored, {own[-1]} says something else"
            assert getattr(request, own[-1]) == value


def test_of_several_synonyms_one_counts() -> None:
    request = ChatRequest()
    warnings = take_foreign_fields(request, {"max_new_tokens": 5, "n_predict": 6})
    assert request.max_tokens == 6
    assert warnings == ["max_new_tokens: ignored, max_tokens says something else"]


def test_a_synonym_of_the_wrong_type_is_refused() -> None:
    for value in ("5", True, 5.5, [5]):
        with pytest.raises(InvalidParameter, match="n_predict: expected") as raised:
            take_foreign_fields(ChatRequest(), {"n_predict": value})
        assert raised.value.param == "n_predict"


OFF: list[tuple[str, Any, Any]] = [
    ("tfs_z", 1, 0.95),
    ("top_a", 0, 0.1),
    ("adaptive_target", -1, 0.5),
    ("no_repeat_ngram_size", 0, 3),
    ("length_penalty", 1.0, 0.5),
    ("num_beams", 1, 4),
    ("use_beam_search", False, True),
    ("modalities", ["text"], ["audio"]),
    ("lora_path", "", "adapter"),
    ("documents", [], [{"text": "x"}]),
    ("custom_logit_processor", "", "x"),
    ("n_probs", 0, 5),
    ("kv_transfer_params", {}, {"do_remote_decode": True}),
]


@pytest.mark.parametrize(("name", "off", "on"), OFF, ids=[row[0] for row in OFF])
def test_what_does_not_exist_may_be_off(name: str, off: Any, on: Any) -> None:
    same = {name, *(each for group in SYNONYMS if name in group for each in group)}
    lacking = {route: kind for route, kind in ROUTES.items() if same.isdisjoint(kind.__struct_encode_fields__)}
    assert {"messages", "ollama"} <= lacking.keys()
    for route, kind in lacking.items():
        assert take_foreign_fields(kind(), {name: off}) == [], route
        assert take_foreign_fields(kind(), {name: None}) == [], route
        with pytest.raises(UnsupportedParameter) as raised:
            take_foreign_fields(kind(), {name: on})
        assert raised.value.param == name
        assert raised.value.message.startswith(f"{name} is not supported")


HINTS: list[tuple[str, Any]] = [
    ("prediction", {"type": "content", "content": "x"}),
    ("web_search_options", {}),
    ("vllm_xargs", {"a": 1}),
    ("cache_prompt", False),
    ("enable_thinking", True),
    ("enable_thinking", False),
    ("separate_reasoning", False),
    ("penalize_nl", False),
    ("repeat_last_n", 64),
    ("id_slot", 3),
    ("request_id", "abc"),
    ("speculative.n_max", 4),
    ("reasoning_format", "none"),
    ("mm_processor_kwargs", {"a": 1}),
    ("spaces_between_special_tokens", False),
    ("do_sample", 1.5),
]


@pytest.mark.parametrize(("name", "value"), HINTS, ids=[f"{row[0]}-{row[1]}"[:40] for row in HINTS])
def test_hints_are_accepted_and_told(name: str, value: Any) -> None:
    for route, kind in ROUTES.items():
        if name not in kind.__struct_encode_fields__:
            [warning] = take_foreign_fields(kind(), {name: value})
            assert warning.startswith(f"{name}: no effect, "), route


def test_samplers_mean_nothing_where_no_token_is_drawn(live: LiveServer) -> None:
    """A body made for messages can be counted."""
    body = {"messages": HELLO, "typical": 0.9, "mirostat": 2, "samplers": ["top_k"]}
    answer = post(live, "/v1/messages/count_tokens", body)
    assert answer.status == 200, answer.text
    told = answer.headers[HEADER].split("; ")
    assert {warning.partition(": ")[2] for warning in told} == {"no effect, this route draws no tokens"}
    assert {warning.partition(": ")[0] for warning in told} == {"typical", "mirostat", "samplers"}


def test_no_sampling_is_a_temperature_of_nothing() -> None:
    request = ChatRequest()
    assert take_foreign_fields(request, {"do_sample": False}) == []
    assert request.temperature == 0.0
    assert take_foreign_fields(request, {"do_sample": True}) == []
    request = ChatRequest(temperature=0.7)
    assert take_foreign_fields(request, {"do_sample": False}) == ["do_sample: ignored, temperature says something else"]
    assert request.temperature == 0.7


def test_parameters_of_what_is_off_are_accepted() -> None:
    companions = {name: 0.5 for name, field in FOREIGN_FIELDS.items() if field.depends}
    assert {"adaptive_decay", "negative_prompt", "custom_params"} <= set(companions)
    for kind in ROUTES.values():
        assert take_foreign_fields(kind(), companions) == []


def test_other_fields_are_told() -> None:
    for kind in ROUTES.values():
        assert take_foreign_fields(kind(), {"made_up": msgspec.Raw(b"[1]")}) == ["made_up: an unknown field, ignored"]
    assert read_options({"made_up": 1})[1] == ["options.made_up: an unknown option, ignored"]


def asked_on(live: LiveServer, route: str, **fields: Any) -> Response:
    """A request with these fields on one of the routes."""
    match route:
        case "chat":
            return chat(live, **fields)
        case "completions":
            return complete(live, **fields)
        case "responses":
            return post(live, "/v1/responses", {"input": "Hi", "store": False} | fields)
        case "messages":
            return post(live, "/v1/messages", {"messages": HELLO, "max_tokens": 9} | fields)
    return post(live, "/api/chat", {"messages": HELLO, "stream": False, "options": fields})


@pytest.mark.parametrize("route", ["chat", "completions", "responses", "messages", "ollama"])
def test_every_route_takes_them(live: LiveServer, route: str) -> None:
    silent = {"dry_multiplier": 0, "xtc_probability": 0, "typical_p": 1, "mirostat": 0, "mirostat_tau": 5}
    response = asked_on(live, route, **silent, top_n_sigma=-1, dynatemp_range=0)
    assert response.status == 200, response.text
    assert HEADER not in response.headers
    at = "options." if route == "ollama" else ""
    response = asked_on(live, route, prediction={"type": "content", "content": "x"}, web_search_options={})
    assert response.headers[HEADER].startswith(f"{at}prediction: no effect, ")
    assert f"{at}web_search_options: no effect" in response.headers[HEADER]
    refused = asked_on(live, route, top_a=0.5)
    assert refused.status == 400
    assert f"{at}top_a is not supported" in refused.text
    limit = {} if route == "messages" else {"n_predict": 9}
    assert asked_on(live, route, **limit, repeat_penalty=1.25).status == 200
    sampling = live.scheduler.added[-1].sampling
    assert (sampling.max_tokens, sampling.repetition_penalty) == (9, 1.25)


OTHER_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/conversations": {},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {"model": "test/model"},
    "/api/embed": {"model": "test/model", "input": []},
}


@pytest.mark.parametrize("path", OTHER_ROUTES)
def test_routes_that_generate_nothing_tell_them_too(live: LiveServer, path: str) -> None:
    answer = post(live, path, {**OTHER_ROUTES[path], "nonsense": 1})
    assert answer.status == 200, answer.text
    assert answer.headers[HEADER] == "nonsense: an unknown field, ignored"
    assert post(live, path, {**OTHER_ROUTES[path], "documents": ["a"]}).status == 400


def test_beside_the_name_of_the_api(live: LiveServer) -> None:
    response = chat(live, max_tokens=5, n_predict=5, max_new_tokens=5)
    assert response.status == 200
    assert HEADER not in response.headers
    response = chat(live, max_completion_tokens=5, n_predict=6)
    assert response.headers[HEADER] == "n_predict: ignored, max_completion_tokens says something else"
    assert live.scheduler.added[-1].sampling.max_tokens == 5


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 3.0}, {"top_k": 20.0, "n": 1.0}, {"seed": 7.0, "top_p": 1.0}], ids=str
)
def test_whole_numbers_may_have_a_fraction(live: LiveServer, fields: dict[str, Any]) -> None:
    for response in (chat(live, **fields), complete(live, **fields)):
        assert response.status == 200, response.text
    sampling = live.scheduler.added[-1].sampling
    for name, value in fields.items():
        if name != "n":
            assert getattr(sampling, name) == value
    body = b'{"prompt": "x", "max_tokens": 3.5}'
    assert error_of(post(live, "/v1/completions", body), 400)["param"] == "max_tokens"
    body = b'{"prompt": "x", "max_tokens": 3.0, "n": "one"}'
    assert error_of(post(live, "/v1/completions", body), 400)["param"] == "n"


def test_a_byte_order_mark_is_skipped(live: LiveServer) -> None:
    for path, body in (
        ("/v1/completions", b'{"prompt": "Hi"}'),
        ("/v1/messages", b'{"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}'),
        ("/api/generate", b'{"prompt": "Hi", "stream": false}'),
        ("/tokenize", b'{"prompt": "Hi"}'),
    ):
        assert post(live, path, b"\xef\xbb\xbf" + body).status == 200, path


def test_a_top_p_of_nothing_is_greedy(live: LiveServer) -> None:
    for ask in (chat, complete):
        assert ask(live, top_p=0, temperature=0.8).status == 200
        sampling = live.scheduler.added[-1].sampling
        assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


def test_a_seed_of_minus_one_is_none(live: LiveServer) -> None:
    seeds = set()
    for _ in range(3):
        assert complete(live, seed=-1).status == 200
        seeds.add(live.scheduler.added[-1].sampling.seed)
    assert len(seeds) == 3


def test_the_prompt_is_what_it_was(live: LiveServer) -> None:
    assert chat(live).status == 200
    plain = prompt_ids(live.scheduler.added[-1])
    assert chat(live, n_predict=5, max_tokens=5.0, typical_p=1).status == 200
    assert prompt_ids(live.scheduler.added[-1]) == plain
