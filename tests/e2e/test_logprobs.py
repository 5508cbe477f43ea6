"""Log-probabilities through real processes equal transformers' (fp32, 1e-4); loglikelihoods as lm-eval asks."""

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.e2e.checkpoints import greedy
from tests.e2e.conftest import Checkpoint
from tests.e2e.loglikelihoods import expected_likelihood, pairs, parse, payload
from tests.e2e.servers import Server, serving, stream
from tests.internal_fields import internal

TOLERANCE = 1e-4
FLAGS = ("--served-model-name", "m", "--dtype", "float32")


@torch.inference_mode()
def expected(model: transformers.PreTrainedModel, tokens: list[int]) -> list[float]:
    """The log-probability of every token but the first."""
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return [float(x) for x in logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]]


async def complete(http: aiohttp.ClientSession, server: Server, **body: Any) -> dict[str, Any]:
    async with http.post(f"{server.url}/v1/completions", json={"model": "m"} | body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def check_echo(model: transformers.PreTrainedModel, choice: dict[str, Any]) -> None:
    tokens = choice["prompt_token_ids"] + choice["token_ids"]
    told = choice["logprobs"]["token_logprobs"]
    assert told[0] is None
    assert told[1:] == pytest.approx(expected(model, tokens), abs=TOLERANCE)
    for token, top in zip(told[1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert token in top.values()


@pytest.mark.parametrize(
    "flags",
    [
        (),
        # 24 pages of 16 tokens for six sequences of up to 364: preemption for sure
        ("--num-pages", "24", "--max-model-len", "380", "--max-num-batched-tokens", "64"),
    ],
    ids=["defaults", "depth2-tiny-pool"],
)
async def test_equal_to_transformers(checkpoint: Checkpoint, flags: tuple[str, ...]) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 259) for _ in range(length)] for length in (1, 2, 17, 64, 129, 300)]
    asked = {"echo": True, "logprobs": 2, "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}
    depth = internal(pipeline_depth=2) if flags else {}
    async with serving(checkpoint.folder, *FLAGS, *flags, **depth) as server, aiohttp.ClientSession() as http:
        for _ in range(2):  # the second time all prompts are in the prefix cache
            answers = await asyncio.gather(
                *(complete(http, server, prompt=p, temperature=i % 2, seed=i, **asked) for i, p in enumerate(prompts))
            )
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                [choice] = answer["choices"]
                assert choice["prompt_token_ids"] == prompt
                check_echo(checkpoint.model, choice)
                if i % 2 == 0:
                    assert choice["token_ids"] == greedy(checkpoint.model, prompt, 64)
        metrics = await server.settled(http)
        if flags:
            assert metrics["penstock_num_preemptions_total"] > 0
        else:
            await check_streams(http, server, prompts[2])
            await asyncio.to_thread(check_official_client, server, checkpoint)


async def check_streams(http: aiohttp.ClientSession, server: Server, prompt: list[int]) -> None:
    body = {"model": "m", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 20, "temperature": 0}
    [whole] = (await complete(http, server, **body))["choices"]
    columns: dict[str, list[Any]] = {}
    async for event in stream(http, f"{server.url}/v1/completions", body):
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(values)
    numbers = whole["logprobs"]["token_logprobs"][1:]
    assert columns["token_logprobs"][1:] == pytest.approx(numbers, abs=TOLERANCE)
    assert [columns[name] for name in ("tokens", "text_offset")] == [
        whole["logprobs"][name] for name in ("tokens", "text_offset")
    ]
    [ended] = (await complete(http, server, **body | {"max_tokens": 0}))["choices"]
    assert ended["logprobs"]["token_logprobs"][1:] == pytest.approx(numbers[: len(prompt) - 1], abs=TOLERANCE)


def check_official_client(server: Server, checkpoint: Checkpoint) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    messages: Any = [{"role": "user", "content": "Hello there"}]
    asked: dict[str, Any] = {"model": "m", "messages": messages, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    asked["max_tokens"] = 12
    prompt = tokenizer.encode("<s>user: Hello there\nassistant:", add_special_tokens=False).ids
    output = greedy(checkpoint.model, prompt, 12)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        logprobs = client.chat.completions.create(**asked).choices[0].logprobs
        assert logprobs is not None
        content = logprobs.content or []
        told = expected(checkpoint.model, prompt + output)[len(prompt) - 1 :][: len(content)]
        assert [entry.logprob for entry in content] == pytest.approx(told, abs=TOLERANCE)
        for entry in content:
            assert entry.top_logprobs[0].token == entry.token
            assert entry.top_logprobs[0].bytes == entry.bytes
            assert len(entry.top_logprobs) == 3
        streamed = [
            entry
            for chunk in client.chat.completions.create(**asked, stream=True)
            for choice in chunk.choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content or []
        ]
        assert [entry.token for entry in streamed] == [entry.token for entry in content]
        # Not to the last bit: this prompt came from the prefix cache.
        told = [best.logprob for entry in content for best in entry.top_logprobs]
        again = [best.logprob for entry in streamed for best in entry.top_logprobs]
        assert again == pytest.approx(told, abs=TOLERANCE)
        best = client.completions.create(
            model="m", prompt="abc", best_of=5, n=2, max_tokens=6, logprobs=0, seed=3, extra_body={"ignore_eos": True}
        )
        means = [sum(choice.logprobs.token_logprobs or [0]) for choice in best.choices if choice.logprobs]
        assert len(means) == 2
        assert means == sorted(means, reverse=True)


async def test_loglikelihoods_as_lm_eval_asks_for_them(checkpoint: Checkpoint) -> None:
    """Its requests and its reading of the answers, in batches, by token ids and by text."""
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))
    encoded = [
        tuple(tokenizer.encode(text, add_special_tokens=False).ids for text in (context, choice))
        for context, choice in pairs()
    ]
    wanted = [expected_likelihood(checkpoint.model, context, choice) for context, choice in encoded]
    async with serving(checkpoint.folder, *FLAGS) as server, aiohttp.ClientSession() as http:
        for as_text in (False, True):
            by_ids = [context + choice for context, choice in encoded]
            by_text = [context + choice for context, choice in pairs()]
            prompts: list[Any] = by_text if as_text else by_ids
            found = []
            for i in range(0, len(prompts), 8):
                lens = [len(context) for context, _ in encoded[i : i + 8]]
                found += parse(await complete(http, server, **payload(prompts[i : i + 8])), lens)
            assert [x.logprob for x in found] == pytest.approx([x.logprob for x in wanted], abs=TOLERANCE)
            assert [x.is_greedy for x in found] == [x.is_greedy for x in wanted]
        # What the model itself would say next is greedy.
        context = encoded[0][0]
        own = greedy(checkpoint.model, context, 4)
        [likelihood] = parse(await complete(http, server, **payload([context + own])), [len(context)])
        assert likelihood.is_greedy


async def test_lm_eval_itself(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Runs where lm-eval is installed (`pip install "lm-eval[api]"`); the test above sends the same requests."""
    completions_api = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    shutil.copy(checkpoint.folder / "tokenizer.json", tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer.json"))

    def ask(url: str) -> Any:
        model = completions_api(
            base_url=f"{url}/v1/completions",
            model="m",
            tokenizer=str(tmp_path),
            tokenizer_backend="huggingface",
            batch_size=4,
        )
        tasks = [instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs())]
        return model.loglikelihood(tasks, disable_tqdm=True)

    async with serving(checkpoint.folder, *FLAGS) as server:
        found = await asyncio.to_thread(ask, server.url)
    for (context, choice), (logprob, is_greedy) in zip(pairs(), found, strict=True):
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in (context, choice)]
        wanted = expected_likelihood(checkpoint.model, *ids)
        assert logprob == pytest.approx(wanted.logprob, abs=TOLERANCE)
        assert is_greedy == wanted.is_greedy
