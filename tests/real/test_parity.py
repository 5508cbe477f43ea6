"""Trained models say token for token what `transformers` says, with the weights of the same files as fp32.

However their requests are scheduled: in batches, in chunks of prompts, from the prefix cache, after preemptions, with
drafts, and when the worker dies in the middle.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.frontend.text.tokenizer import load_tokenizer
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.gpu_worker.state.kv_pool import page_groups
from penstock.ipc.messages import SamplingParams
from penstock.models.finding.registry import open_checkpoint
from tests.e2e.servers import Server, serving
from tests.faults.streams import Told, client, spare_is_there, told
from tests.gpu_worker.checkpoints import greedy_errors
from tests.gpu_worker.engine_in_process import Engine
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.drafters import Always
from tests.real.conftest import FLAGS, Oracle
from tests.real.fetched import gemma3, only_real, smollm2, the_file

pytestmark = only_real

NUM_NEW = 40
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
PAGE = 16
SAFE_GAP = 2e-4
"""Two logits closer than this could change places by rounding alone: then a prompt here is not one to compare by."""

_WALK = "The miller walked along the old canal until he came to the lock. "
TEXTS = (
    "The",
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    '{"name": "sluice", "width": 3, "height": 2}\n{"name": "weir", "width": 9, "height": 1}\n{"name": "lock", "width":',
    "one two three four five six seven eight nine ten one two three four five six seven eight nine ten one two",
    "Die Schleuse wurde im Jahr 1847 gebaut und",
    "Q: What does a penstock do?\nA: It controls the flow of water.\nQ: What does a weir do?\nA:",
    "| river | length |\n| --- | --- |\n| Rhine | 1233 |\n| Danube | 2850 |\n|",
    _WALK * 6 + "Then",
    "Minutes of the meeting.\n\n" + "".join(f"{i}. {_WALK}\n" for i in range(1, 17)) + "17.",
)
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0)


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    fetch: Callable[[], Path] = request.param
    return the_file(fetch)


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(open_checkpoint(model))
    return [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]


def tight(model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """A pool that holds little more than the longest prompt: they preempt each other."""
    num_groups = len(page_groups(load_model_config(model), PAGE))
    num_pages = num_groups * (-(-(max(map(len, prompts)) + NUM_NEW) // PAGE) + 2)
    return {"page_size": PAGE, "num_pages": num_pages, "max_num_batched_tokens": 48, "pipeline_depth": 1}


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]], oracle: Oracle) -> list[list[int]]:
    """What the engine says in a tight pool, if that is what transformers says."""
    engine = Engine(model, **tight(model, prompts), enable_prefix_caching=False)
    outputs = [sequences[0] for sequences in engine.run(prompts, GREEDY)]
    assert engine.scheduler.stats().num_preemptions > 0
    engine.close()
    theirs = partial(oracle(model), logits_to_keep=NUM_NEW)  # those of all positions take most of the time
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_NEW
        errors, gap = greedy_errors(theirs, prompt, output)
        assert not errors, f"prompt of {len(prompt)}: wrong at outputs {errors[:5]}"
        assert gap > SAFE_GAP, f"prompt of {len(prompt)}"
    return outputs


def test_in_a_tight_pool_with_drafts(model: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(model, **tight(model, prompts), speculative_config=NGRAM)
    drafting_of(engine.scheduler).lengths = always = Always(engine.hello.max_drafts)
    assert [sequences[0] for sequences in engine.run(prompts, GREEDY)] == expected
    assert engine.scheduler.stats().num_preemptions > 0
    assert always.num_guessed > always.num_right > 0
    engine.close()


async def test_served_in_chunks_from_the_cache_and_through_a_kill(
    model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """All at once through a real server, again from its prefix cache, and again while its worker dies."""
    bodies: list[dict[str, Any]] = [
        {"model": "m", "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
        | {"return_token_ids": True, "stream_options": {"include_usage": True}}
        for prompt in prompts
    ]
    async with serving(model, *FLAGS, "--speculative-config", NGRAM) as server, client() as http:
        assert [one.tokens for one in await run(http, server, bodies)] == expected
        before = (await server.settled(http))["penstock_prompt_tokens_cached_total"]
        assert [one.tokens for one in await run(http, server, bodies)] == expected
        num_hits = (await server.settled(http))["penstock_prompt_tokens_cached_total"] - before
        assert num_hits >= sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
        await spare_is_there(server)
        position, num_events = len(server.log), 0

        def killing() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == 4 * len(prompts):
                server.children()["penstock-worker-0"].kill()

        assert [one.tokens for one in await run(http, server, bodies, killing)] == expected
        await server.logged("worker connected", after=position)
        metrics = await server.settled(http)
        assert (
            metrics["penstock_num_free_pages"] + metrics["penstock_num_cached_pages"] == metrics["penstock_num_pages"]
        )


async def run(
    http: aiohttp.ClientSession,
    server: Server,
    bodies: Sequence[dict[str, Any]],
    on_event: Callable[[], None] = lambda: None,
) -> list[Told]:
    """All at once; each ends as it should."""
    found = await asyncio.gather(*(told(http, server, body, on_event) for body in bodies))
    assert {tuple(one.ends) for one in found} == {("length", "[DONE]")}
    return found
