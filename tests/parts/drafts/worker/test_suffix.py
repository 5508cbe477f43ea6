"""Suffix decoding in an engine: outputs are the same, and what others with the same salt got takes fewer steps."""

import json
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.ipc.codec import pack_int32
from penstock.ipc.messages import AddRequest, SamplingParams
from penstock.parts.drafts.scheduler.lengths import FixedLengths
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.engine_in_process import Engine, make_config
from tests.parts.drafts.lengths import drafting_of
from tests.parts.drafts.worker.test_drafts import Make

PROMPT = prompts((24,))[0]
NUM_NEW = 40
DRAWN = SamplingParams(max_tokens=NUM_NEW, temperature=1.5, seed=11)  # nothing repeats in it


def suffix(**keys: Any) -> str:
    return json.dumps({"method": "suffix", "num_speculative_tokens": 6} | keys)


def ask(
    engine: Engine, salt: str = "", sampling: SamplingParams = DRAWN, prompt: list[int] = PROMPT
) -> tuple[Any, int]:
    """One request to its end: its tokens, and its steps."""
    before = engine.scheduler.totals.num_steps
    request_id = f"{before}-{salt}"
    engine.outputs[request_id, 0] = []
    assert engine.add_request(AddRequest(request_id, pack_int32(prompt), sampling, cache_salt=salt)) is None
    drafting_of(engine.scheduler).lengths = FixedLengths(6)  # as many as there are, whether they pay or not
    engine.drain()
    return engine.outputs[request_id, 0], engine.scheduler.totals.num_steps - before


@pytest.mark.parametrize("depth", [0, 1])
def test_an_output_that_comes_again_takes_fewer_steps(checkpoint: Make, depth: int) -> None:
    folder = checkpoint("llama")[0]
    [[expected]] = Engine(folder).run([PROMPT], DRAWN)
    engine = Engine(folder, speculative_config=suffix(), pipeline_depth=depth)
    first, again, elsewhere, elsewhere_again = [ask(engine, salt) for salt in ("", "", "tenant b", "tenant b")]
    assert [first[0], again[0], elsewhere[0], elsewhere_again[0]] == [expected] * 4
    assert again[1] < 0.4 * first[1]
    assert elsewhere[1] == first[1], "another salt learns nothing, and its time tells nothing"
    assert elsewhere_again[1] == again[1]
    off = SamplingParams(max_tokens=NUM_NEW, temperature=1.5, seed=12, max_drafts=0)
    on = SamplingParams(max_tokens=NUM_NEW, temperature=1.5, seed=12)
    unseen = ask(engine, sampling=off)[1]
    assert ask(engine, sampling=on)[1] > 0.8 * unseen, "what a request without guesses gave is not kept"


def test_nothing_is_shared_where_nothing_is_kept(checkpoint: Make) -> None:
    engine = Engine(checkpoint("llama")[0], speculative_config=suffix(suffix_decoding_max_cached_requests=0))
    first, again = ask(engine), ask(engine)
    assert first == again


def test_preempted_sequences_and_small_memories_change_nothing(checkpoint: Make) -> None:
    folder = checkpoint("llama")[0]
    texts = [[*prompt] for prompt in prompts((9, 30, 17, 25))] * 2
    sampling = [SamplingParams(max_tokens=50, temperature=0.0 if i % 2 else 0.8, seed=i) for i in range(len(texts))]
    expected = Engine(folder, enable_prefix_caching=False).run(texts, sampling)
    config = suffix(suffix_decoding_max_cached_tokens=1024, suffix_decoding_max_spec_factor=2.0)
    engine = Engine(folder, speculative_config=config, pipeline_depth=1, num_pages=18, enable_prefix_caching=False)
    for _ in range(2):
        assert engine.run(texts, sampling) == expected
    assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("keys", "options", "word"),
    [
        ({"suffix_decoding_max_cached_tokens": 5000}, {}, "power of 2"),
        ({"suffix_decoding_min_token_prob": 2}, {}, "suffix_decoding_min_token_prob"),
        ({"suffix_decoding_depth": 2}, {}, "suffix_decoding_depth"),
        ({}, {"pipeline_parallel_size": 2}, "stages of a pipeline"),
    ],
)
def test_what_cannot_work_is_refused(
    checkpoint: Make, keys: dict[str, Any], options: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        make_config(checkpoint("llama")[0], speculative_config=suffix(**keys), **options)
