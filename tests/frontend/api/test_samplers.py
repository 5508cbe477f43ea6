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
    "preset": None, "temperature": 1, "dynatemp_low": 1, "dynatemp_high": 1, "dynatemp_exponent": 1, "top_p": 1,
    "smoothing_factor": 0, "smoothing_curve": 1, "min_p": 0, "top_k": 0, "typical_p": 1, "xtc_threshold": 0.1,
    "xtc_probability": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "tfs": 1, "top_a": 0, "top_n_sigma": 0,
    "adaptive_target": 0, "adaptive_decay": 0.9, "dry_multiplier": 0, "dry_allowed_length": 2, "dry_base": 1.75,
    "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0, "repetition_penalty_range": 1024, "penalty_alpha": 0, "guidance_scale": 1,
    "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "prompt_lookup_num_tokens": 0, "max_tokens_second": 0,
    "do_sample": True, "dynamic_temperature": False, "temperature_last": False, "auto_max_new_tokens": False,
    "ban_eos_token": False, "add_bos_token": True, "enable_thinking": True, "reasoning_effort": "medium",
    "preserve_thinking": False, "skip_special_tokens": True, "static_cache": False, "truncation_length": 0, "seed": -1,
    "sampler_priority": "repetition_penalty\npresence_penalty\nfrequency_penalty\ndry\ntop_n_sigma\ntemperature\n"
    "dynamic_temperature\nquadratic_sampling\ntop_k\ntop_p\ntypical_p\nepsilon_cutoff\neta_cutoff\ntfs\ntop_a\nmin_p\n"
    "adaptive_p\nmirostat\nxtc\nencoder_repetition_penalty\nno_repeat_ngram",
    "custom_token_bans": "", "negative_prompt": "", "dry_sequence_breakers": '"\\n", ":", "\\"", "*"',
    "grammar_string": "", "best_of": 1, "echo": False, "logit_bias": None, "logprobs": None, "max_tokens": 512, "n": 1,
    "stop": None, "stream": False, "stream_options": None, "suffix": None, "user": None,
}  # fmt: skip
"""Of its API, with the defaults of its command line."""

_TAVERN: dict[str, Any] = {
    "model": "alias", "max_new_tokens": 350, "max_tokens": 350, "temperature": 0.7, "top_p": 0.5, "typical_p": 1,
    "typical": 1, "sampler_seed": -1, "min_p": 0, "repetition_penalty": 1.2, "frequency_penalty": 0,
    "presence_penalty": 0, "top_k": 40, "skew": 0, "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0,
    "smoothing_curve": 1, "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n",":","\\"","*"]', "dry_penalty_last_n": 0, "max_tokens_second": 0,
    "stopping_strings": ["\nUser:"], "stop": ["\nUser:"], "truncation_length": 2048, "ban_eos_token": False,
    "skip_special_tokens": True, "top_a": 0, "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1,
    "custom_token_bans": "", "banned_strings": [], "api_server": "http://127.0.0.1:5000/", "legacy_api": False,
    "xtc_threshold": 0.1, "xtc_probability": 0,
}  # fmt: skip
_TAVERN_OTHERS: dict[str, Any] = {
    "rep_pen": 1.2, "rep_pen_range": 0, "repetition_penalty_range": 0, "seed": -1, "guidance_scale": 1,
    "negative_prompt": "", "grammar_string": "", "repeat_penalty": 1.2, "tfs_z": 1, "repeat_last_n": 0,
    "n_predict": 350, "num_predict": 350, "num_ctx": 2048, "mirostat": 0, "ignore_eos": False, "rep_pen_slope": 1,
}  # fmt: skip
SILLY_TAVERN: dict[str, dict[str, Any]] = {
    "ooba": _TAVERN | _TAVERN_OTHERS | {
        "min_length": 0, "num_beams": 1, "length_penalty": 1, "early_stopping": False, "epsilon_cutoff": 0,
        "eta_cutoff": 0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "penalty_alpha": 0,
        "temperature_last": True, "do_sample": True, "api_type": "ooba",
        "sampler_priority": [
            "temperature", "dynamic_temperature", "quadratic_sampling", "top_k", "top_p", "typical_p",
            "epsilon_cutoff", "eta_cutoff", "tfs", "top_a", "min_p", "mirostat",
        ],
    },
    "koboldcpp": _TAVERN | _TAVERN_OTHERS | {"grammar": "", "sampler_order": [6, 0, 1, 3, 4, 2, 5]},
    "tabby": _TAVERN | _TAVERN_OTHERS | {
        "repetition_decay": 0, "temperature_last": True, "speculative_ngram": False, "json_schema": {}, "n": 1,
    },
    "llamacpp": _TAVERN | _TAVERN_OTHERS | {
        "samplers": ["top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"], "logit_bias": [], "grammar": "",
        "cache_prompt": True,
    },
    "vllm": {
        name: value for name, value in _TAVERN.items()
        if name in ("model", "frequency_penalty", "max_tokens", "presence_penalty", "stop", "temperature", "top_p",
                    "top_k", "min_p", "repetition_penalty", "min_tokens", "skip_special_tokens")
    } | {"n": 1, "best_of": 1, "ignore_eos": False, "spaces_between_special_tokens": True},
    "aphrodite": _TAVERN | {
        "n": 1, "temperature_last": True, "eta_cutoff": 0, "epsilon_cutoff": 0, "ignore_eos": False,
        "spaces_between_special_tokens": True, "guided_grammar": "", "guided_json": {}, "early_stopping": False,
        "include_stop_str_in_output": False, "custom_token_bans": [],
    },
}  # fmt: skip
"""By the kind of server that it thinks it talks to."""

OF_OLLAMA = (
    "num_predict", "num_ctx", "stop", "temperature", "repeat_penalty", "presence_penalty", "frequency_penalty", "top_k",
    "top_p", "tfs_z", "typical_p", "seed", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "min_p",
)  # fmt: skip
"""What it keeps for Ollama."""


def sent(live: LiveServer) -> SamplingParams:
    params: SamplingParams = live.scheduler.added[-1].sampling
    return params


def used(live: LiveServer, **fields: Any) -> list[str]:
    """The samplers that are sent for such a request, in order."""
    response = complete(live, **OFF | fields)
    assert response.status == 200, response.text
    return [use.name for use in sent(live).samplers]


def test_the_default_body_of_text_generation_webui(live: LiveServer) -> None:
    for ask in (chat, complete):
        fields = {name: value for name, value in TEXT_GENERATION_WEBUI.items() if ask is complete or name != "suffix"}
        fields.pop("echo" if ask is chat else "", None)
        response = ask(live, **fields | ({"logprobs": False} if ask is chat else {}))
        assert response.status == 200, response.text
        assert not sent(live).samplers


@pytest.mark.parametrize("kind", SILLY_TAVERN)
def test_default_bodies_of_silly_tavern(live: LiveServer, kind: str) -> None:
    response = post(live, "/v1/completions", {"prompt": "Hello"} | SILLY_TAVERN[kind])
    assert response.status == 200, response.text
    penalties = [use for use in sent(live).samplers if use.name == "penalties"]
    is_named = kind != "llamacpp"  # whose list leaves them out
    assert is_named == (sent(live).repetition_penalty == 1.2 or bool(penalties))


def test_the_default_body_of_silly_tavern_for_ollama(live: LiveServer) -> None:
    options = {name: value for name, value in (_TAVERN | _TAVERN_OTHERS).items() if name in OF_OLLAMA}
    body = {"model": "alias", "prompt": "Hello", "stream": False, "keep_alive": -1, "raw": True, "options": options}
    response = post(live, "/api/generate", body)
    assert response.status == 200, response.text
    assert (sent(live).top_k, sent(live).repetition_penalty) == (40, 1.2)


def test_pairs_of_biases(live: LiveServer) -> None:
    """llama.cpp's form."""
    complete(live, logit_bias=[[5, 1.5], [7, False]])
    assert sent(live).logit_bias == ((5, 1.5), (7, -100.0))
    for bad in ([[5]], [["a", 1]], [[5, True]], [[5, None]], [[True, 1]]):
        assert error_of(complete(live, logit_bias=bad), 400)["param"] == "logit_bias[0]"


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
    bent = dynamic | {"smoothing_factor": 0.3, "temperature_last": True}
    assert used(live, **bent)[-3:] == ["typical_p", "dynamic_temperature", "smoothing"]


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
