"""What becomes of the fields about samplers: what is sent to the engine, in which order, and what is refused."""

from typing import Any

import pytest

from penstock.ipc.messages import SamplerUse, SamplingParams
from tests.frontend.http_client import HELLO, chat, complete, error_of, get, post
from tests.frontend.live_server import LiveServer

HEADER = "x-penstock-warning"
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Of what the checkpoint has defaults for."""

LLAMA_ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]

TEXT_GENERATION_WEBUI: dict[str, Any] = {
    "max_tokens": 16, "temperature": 1, "dynatemp_low": 1, "dynatemp_high": 1, "dynatemp_exponent": 1,
    "smoothing_factor": 0, "smoothing_curve": 1, "min_p": 0, "top_p": 1, "top_k": 0, "typical_p": 1,
    "xtc_threshold": 0.1, "xtc_probability": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "tfs": 1, "top_a": 0,
    "top_n_sigma": 0, "dry_multiplier": 0, "dry_allowed_length": 2, "dry_base": 1.75, "repetition_penalty": 1,
    "frequency_penalty": 0, "presence_penalty": 0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "repetition_penalty_range": 1024,
    "penalty_alpha": 0, "guidance_scale": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "seed": -1,
    "do_sample": True, "dynamic_temperature": False, "temperature_last": False, "ban_eos_token": False,
    "add_bos_token": True, "skip_special_tokens": True, "truncation_length": 2048, "negative_prompt": "",
    "dry_sequence_breakers": '"\\n", ":", "\\"", "*"',
    "sampler_priority": "repetition_penalty\npresence_penalty\nfrequency_penalty\ndry\ntop_n_sigma\ntemperature\n"
    "dynamic_temperature\nquadratic_sampling\ntop_k\ntop_p\ntypical_p\nepsilon_cutoff\neta_cutoff\ntfs\ntop_a\nmin_p\n"
    "mirostat\nxtc\nencoder_repetition_penalty\nno_repeat_ngram",
}  # fmt: skip
SILLY_TAVERN: dict[str, Any] = {
    "max_new_tokens": 16, "max_tokens": 16, "temperature": 0.7, "top_p": 0.5, "typical_p": 1, "typical": 1,
    "sampler_seed": -1, "min_p": 0, "repetition_penalty": 1.2, "frequency_penalty": 0, "presence_penalty": 0,
    "top_k": 40,
    "skew": 0, "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1,
    "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0, "max_tokens_second": 0, "stopping_strings": ["\nUser:"], "stop": ["\nUser:"],
    "truncation_length": 2048, "ban_eos_token": False, "skip_special_tokens": True, "top_a": 0, "tfs": 1,
    "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "rep_pen": 1.2, "rep_pen_range": 0,
    "repetition_penalty_range": 0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "penalty_alpha": 0,
    "temperature_last": True, "do_sample": True, "seed": -1, "guidance_scale": 1, "negative_prompt": "",
    "grammar_string": "", "repeat_penalty": 1.2, "tfs_z": 1, "repeat_last_n": 0, "n_predict": 16, "mirostat": 0,
    "ignore_eos": False, "xtc_threshold": 0.1, "xtc_probability": 0, "nsigma": 0, "top_n_sigma": 0,
    "sampler_order": [6, 0, 1, 3, 4, 2, 5], "samplers": LLAMA_ORDER,
    "sampler_priority": ["temperature", "top_k", "top_p", "min_p"], "n_probs": 0,
}  # fmt: skip


def sent(live: LiveServer) -> SamplingParams:
    params: SamplingParams = live.scheduler.added[-1].sampling
    return params


def used(live: LiveServer, **fields: Any) -> list[str]:
    """The samplers that are sent for such a request, in order."""
    response = complete(live, **OFF | fields)
    assert response.status == 200, response.text
    return [use.name for use in sent(live).samplers]


@pytest.mark.parametrize("fields", [TEXT_GENERATION_WEBUI, SILLY_TAVERN], ids=["webui", "tavern"])
def test_default_bodies_of_clients(live: LiveServer, fields: dict[str, Any]) -> None:
    for ask in (chat, complete):
        response = ask(live, **fields)
        assert response.status == 200, response.text


def test_without_any_the_kernels_draw(live: LiveServer) -> None:
    fields = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "dry_multiplier": 0,
    }
    assert used(live, **fields) == []
    params = sent(live)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 5, 0.9, 0.1)
    assert used(live, **fields, samplers=["penalties", "temperature", "min_p", "top_k", "top_p"]) == []
    assert sent(live).top_k == 5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"typical_p": 0.9}, SamplerUse("typical_p", (0.9,))),
        ({"typical": 0.9}, SamplerUse("typical_p", (0.9,))),
        ({"top_n_sigma": 1.5}, SamplerUse("top_n_sigma", (1.5,))),
        ({"nsigma": 1}, SamplerUse("top_n_sigma", (1,))),
        ({"xtc_probability": 0.5}, SamplerUse("xtc", (0.5, 0.1))),
        ({"smoothing_factor": 0.2, "smoothing_curve": 2}, SamplerUse("smoothing", (0.2, 2))),
        ({"epsilon_cutoff": 3}, SamplerUse("epsilon_cutoff", (3 * 1e-4,))),
        ({"eta_cutoff": 3}, SamplerUse("eta_cutoff", (3 * 1e-4,))),
        ({"dynatemp_range": 0.5}, SamplerUse("dynamic_temperature", (0.5, 1.5, 1.0))),
        ({"dynamic_temperature": True, "dynatemp_high": 2}, SamplerUse("dynamic_temperature", (1.0, 2, 1.0))),
        ({"mirostat": 1}, SamplerUse("mirostat", (1, 5.0, 0.1))),
        ({"mirostat_mode": 2, "mirostat_tau": 3, "mirostat_eta": 0.2}, SamplerUse("mirostat", (2, 3, 0.2))),
    ],
)
def test_each_is_sent(live: LiveServer, fields: dict[str, Any], expected: SamplerUse) -> None:
    used(live, **fields)
    assert sent(live).samplers == (expected,)


def test_what_the_kernels_know_goes_along(live: LiveServer) -> None:
    """In one order with the others; for the kernels it is off."""
    fields = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 3}
    names = used(live, **fields, logit_bias={"5": 2}, xtc_probability=1, dry_multiplier=1)
    assert names == ["logit_bias", "penalties", "dry", "temperature", "min_p", "top_k", "top_p", "xtc"]
    params = sent(live)
    assert params.samplers[0].values == (5.0, 2.0)
    neutral = SamplingParams(max_tokens=1)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias"):
        assert getattr(params, name) == getattr(neutral, name), name
    assert params.seed == 3


def test_a_top_p_of_0_holds_in_orders_without_a_temperature(live: LiveServer) -> None:
    assert used(live, top_p=0, samplers=["top_p"]) == ["top_p"]
    assert sent(live).samplers == (SamplerUse("top_p", (0.0,)),)
    assert "top_p" in used(live, top_p=0, dynatemp_range=0.5)
    assert used(live, top_p=0, samplers=["temperature", "top_p"]) == []
    assert sent(live).temperature == 0


def test_breakers_become_tokens(live: LiveServer) -> None:
    for breakers in ([":", "x:"], '[":", "x:"]', '":", "x:"'):
        used(live, dry_multiplier=0.8, dry_range=512, dry_sequence_breakers=breakers)
        [use] = sent(live).samplers
        assert use.values[:4] == (0.8, 1.75, 2, 512)
        expected = {live.tokenizer.encode("a" + text, add_special_tokens=False)[-1] for text in (":", "x:")}
        assert {*use.values[4:]} == expected


def test_orders(live: LiveServer) -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}
    assert used(live, **fields) == ["temperature", "min_p", "top_p", "typical_p"]
    assert used(live, **fields, samplers=LLAMA_ORDER) == ["typical_p", "top_p", "min_p", "temperature"]
    assert used(live, **fields, samplers="ypmt") == ["typical_p", "top_p", "min_p", "temperature"]
    assert used(live, **fields, samplers=["typ_p", "temperature"]) == ["typical_p", "temperature"]  # others are off
    assert used(live, **fields, sampler_priority=["typical_p", "top_p"])[-2:] == ["typical_p", "top_p"]
    assert used(live, **fields, sampler_priority="typical_p\ntemperature") == [
        "min_p",
        "top_p",
        "typical_p",
        "temperature",
    ]
    assert used(live, **fields, temperature_last=True) == ["min_p", "top_p", "typical_p", "temperature"]
    assert used(live, temperature=0.5, top_p=0.9, samplers=["top_p", "temperature"]) == ["top_p", "temperature"]
    dynamic = fields | {"dynatemp_range": 0.2}
    assert used(live, **dynamic, samplers=LLAMA_ORDER)[-1] == "dynamic_temperature"
    assert "temperature" not in used(live, **dynamic)
    assert used(live, **dynamic, temperature_last=True)[-1] == "dynamic_temperature"


def test_mirostat_comes_last(live: LiveServer) -> None:
    """Alone with bias and temperature, as in llama.cpp; or behind what text-generation-webui's list names first."""
    fields: dict[str, Any] = {"mirostat": 2, "temperature": 0.5, "top_p": 0.9, "typical_p": 0.9, "logit_bias": {"5": 2}}
    response = complete(live, **OFF | fields)
    assert [use.name for use in sent(live).samplers] == ["logit_bias", "temperature", "mirostat"]
    assert sent(live).top_p == 1.0
    assert response.headers[HEADER] == "mirostat: no effect beside it: top_p, typical_p"
    assert used(live, **fields, samplers=LLAMA_ORDER, dynatemp_range=0.3) == ["logit_bias", "temperature", "mirostat"]
    theirs = ["temperature", "top_p", "mirostat", "typical_p"]
    assert used(live, **fields, sampler_priority=theirs) == ["logit_bias", "temperature", "top_p", "mirostat"]
    assert used(live, **fields, sampler_priority=theirs, temperature_last=True) == [
        *("logit_bias", "top_p", "temperature", "mirostat"),
    ]
    assert used(live, **fields, sampler_priority=["typical_p"])[-2:] == ["typical_p", "mirostat"]


ALL = {
    "typical_p": 0.9, "top_n_sigma": 1.5, "dry_multiplier": 0.8, "xtc_probability": 0.5, "dynatemp_range": 0.3,
    "smoothing_factor": 0.2, "epsilon_cutoff": 3, "eta_cutoff": 3, "repeat_penalty": 1.25, "min_p": 0.1,
    "logit_bias": {"5": 2}, "dry_sequence_breakers": [":"], "temperature_last": True, "temperature": 0.8, "top_k": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "within"),
    [
        ("/v1/completions", {"prompt": "Hi"}, None),
        ("/v1/responses", {"input": "Hi", "store": False}, None),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, None),
        ("/api/chat", {"messages": HELLO, "stream": False}, "options"),
        ("/api/generate", {"prompt": "Hi", "raw": True, "stream": False}, "options"),
    ],
)
def test_each_dialect_has_all_of_them(live: LiveServer, path: str, body: dict[str, Any], within: str | None) -> None:
    chat(live, **ALL, seed=5)
    expected = sent(live).samplers
    assert len(expected) >= 10
    fields = ALL | {"seed": 5}
    response = post(live, path, body | ({within: fields} if within else fields))
    assert response.status == 200, response.text
    assert sent(live).samplers == expected
    assert sent(live).seed == 5
    fields = {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "temperature": 1.0}
    assert post(live, path, body | ({within: fields} if within else fields)).status == 200
    assert sent(live).samplers == (SamplerUse("mirostat", (2, 4.0, 0.2)),)


def test_a_list_may_switch_off_what_the_kernels_do(live: LiveServer) -> None:
    assert used(live, temperature=0.5, top_p=0.9, samplers=["top_p"]) == []
    assert (sent(live).temperature, sent(live).top_p) == (1.0, 0.9)


def test_the_schema_says_what_they_do(live: LiveServer) -> None:
    schemas = get(live, "/openapi.json").json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest"):
        assert "top choices" in schemas[name]["properties"]["xtc_probability"]["description"]


def test_unknown_names_are_told(live: LiveServer) -> None:
    response = complete(live, samplers=["top_k", "nonsense", "tfs_z"])
    assert response.headers[HEADER] == "samplers: there is no sampler 'nonsense', skipped"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"typical_p": 1.5}, "typical_p"),
        ({"typical_p": "high"}, "typical_p"),
        ({"xtc_probability": -1}, "xtc_probability"),
        ({"dry_base": 9}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_sequence_breakers": "["}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers"),
        ({"samplers": ["top_k"] * 65}, "samplers"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat": 1.5}, "mirostat"),
        ({"mirostat": 2, "mirostat_tau": -1}, "mirostat_tau"),
    ],
)
def test_what_is_refused(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(complete(live, **fields), 400)["param"] == param
