"""A prompt's result is what the server answers: the same tokens and the same text."""

from typing import Any

import aiohttp
import pytest

from penstock import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.servers import serving
from tests.python_api.conftest import SMALL, Checkpoint

PROMPT = "An old song"
MESSAGES = [{"role": "system", "content": "Sing."}, {"role": "user", "content": PROMPT}]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 24},
    "default length": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 0.9, "seed": 7, "max_tokens": 24, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "two": {"n": 2, "seed": 3, "max_tokens": 12},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "samplers": {"temperature": 1.2, "seed": 4, "max_tokens": 20, "dry_multiplier": 0.8, "xtc_probability": 0.5}
    | {"samplers": ["dry", "xtc", "temperature"], "dry_sequence_breakers": ["x"]},
    "logprobs": {"temperature": 0.0, "max_tokens": 6, "logprobs": 3, "prompt_logprobs": 2},
    "bias": {"temperature": 0.0, "max_tokens": 6, "logit_bias": {70: 50.0}, "bad_words": ["x"]},
    "special tokens": {"temperature": 1.5, "seed": 11, "max_tokens": 60, "skip_special_tokens": False, "min_tokens": 9},
    "allowed": {"temperature": 0.0, "max_tokens": 5, "allowed_token_ids": [60, 61, 62], "stop_token_ids": [62]},
    "grammar": {"temperature": 0.0, "max_tokens": 30, "structured_outputs": {"choice": ["red", "green"]}},
}


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    """The same for the server."""
    biases = {str(token_id): bias for token_id, bias in case.get("logit_bias", {}).items()}
    return case | {"return_token_ids": True} | ({"logit_bias": biases} if biases else {})


async def test_the_server_and_the_library_agree(checkpoint: Checkpoint) -> None:
    stopped_by = ""
    with LLM(checkpoint.folder, **SMALL) as llm:
        async with serving(checkpoint.folder, "--dtype", "float32") as server, aiohttp.ClientSession() as session:

            async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
                async with session.post(f"{server.url}/v1/{path}", json=body) as response:
                    answer: dict[str, Any] = await response.json()
                    assert response.status == 200, answer
                    return answer

            for name, case in CASES.items():
                served = await ask("completions", {"prompt": PROMPT} | body_of(case))
                [found] = llm.generate(PROMPT, SamplingParams(**case), use_tqdm=False)
                check(name, found, served["choices"])
                stopped_by = stopped_by or found.outputs[0].text[5:7]
                if "logprobs" in case:
                    check_logprobs(found, served["choices"][0])
            case = {"temperature": 0.0, "max_tokens": 24, "stop": [stopped_by]}
            for include in (False, True):
                asked = case | {"include_stop_str_in_output": include}
                served = await ask("completions", {"prompt": PROMPT} | body_of(asked))
                [found] = llm.generate(PROMPT, SamplingParams(**asked), use_tqdm=False)
                assert found.outputs[0].stop_reason == stopped_by
                assert found.outputs[0].text.endswith(stopped_by) is include
                check(f"stop {include}", found, served["choices"])
            chat: dict[str, Any] = {"temperature": 0.0, "seed": 5, "max_tokens": 20}
            served = await ask("chat/completions", {"messages": MESSAGES} | body_of(chat))
            [found] = llm.chat(MESSAGES, SamplingParams(**chat), use_tqdm=False)
            assert found.prompt_token_ids == served["prompt_token_ids"]
            assert found.outputs[0].text == served["choices"][0]["message"]["content"]
            assert found.outputs[0].token_ids == served["choices"][0]["token_ids"]


def check(name: str, found: Any, choices: list[dict[str, Any]]) -> None:
    ours = [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in found.outputs]
    theirs = [(each["text"], each["token_ids"], each["finish_reason"], each["stop_reason"]) for each in choices]
    assert ours == theirs, name
    assert found.prompt_token_ids == choices[0]["prompt_token_ids"], name
    assert found.prompt == PROMPT


def check_logprobs(found: Any, choice: dict[str, Any]) -> None:
    [output] = found.outputs
    told = choice["logprobs"]
    for token_id, ranked, logprob, best in zip(
        output.token_ids, output.logprobs, told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert ranked[token_id].logprob == pytest.approx(logprob)
        assert {each.decoded_token: pytest.approx(each.logprob) for each in ranked.values()} == best
    assert output.cumulative_logprob == pytest.approx(sum(told["token_logprobs"]))
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids)
    for ours, theirs in zip(found.prompt_logprobs[1:], choice["prompt_logprobs"][1:], strict=True):
        assert {str(token_id): each.rank for token_id, each in ours.items()} == {
            token_id: each["rank"] for token_id, each in theirs.items()
        }


def test_structured_outputs_by_name(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{4}"), max_tokens=10)
    [found] = llm.generate(PROMPT, params, use_tqdm=False)
    assert len(found.outputs[0].text) == 4
    assert set(found.outputs[0].text) <= {"a", "b"}
