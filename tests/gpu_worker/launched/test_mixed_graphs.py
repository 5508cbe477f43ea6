"""Steps with chunks of prompts in graphs: tokens equal those of the CPU path, whatever fits which graph."""

import json
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from penstock.gpu_worker.steps import mixed_graphs, model_runner
from penstock.ipc.messages import SamplingParams
from tests.faults.soak import sized
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.counted_graphs import Counted
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.launched.fake_cuda import use_fake_cuda

Make = Callable[..., Checkpoint]

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
SAMPLING = (
    GREEDY,
    replace(GREEDY, num_logprobs=2, prompt_logprobs=1),
    replace(GREEDY, temperature=0.9, top_p=0.9, seed=3),
)


@pytest.fixture(autouse=True)
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes, so that the interpreter can compute them; and no warm-up, which takes it minutes."""
    monkeypatch.setattr("penstock.gpu_worker.startup.start.warm_up", lambda runner, limits: 0)
    monkeypatch.setattr(mixed_graphs, "_NUM_TOKENS", (8, 16))
    monkeypatch.setattr(mixed_graphs, "_NUM_ROWS", (2,))


@pytest.mark.parametrize("name", ["llama", "qwen2-some-windows", "qwen3"][: sized(2, 3)])
def test_prompts_around_the_sizes(checkpoint: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One after the other, so that each chunk is a step, and all at once, so that they share steps with decodes."""
    folder, _ = checkpoint(name)
    texts = prompts((1, 2, 7, 8, 9, 15, 16, 17), seed=5)
    each = [SAMPLING[i % len(SAMPLING)] for i in range(len(texts))]
    options = schedule(24, 4, 1, num_tokens=200) | {"max_num_seqs": 4}
    expected = Engine(folder, **options).run(texts, each)
    use_fake_cuda(monkeypatch)
    engine = Engine(folder, device="cuda", **options)
    counted = Counted(monkeypatch)
    assert [engine.run([text], params)[0] for text, params in zip(texts, each, strict=True)] == expected
    assert set(counted.sizes) >= {(8, 2), (16, 2)}
    assert counted.num_without == 1  # the prompt of 17 tokens
    engine = Engine(folder, device="cuda", **(options | {"max_num_batched_tokens": 16}))
    assert engine.run(texts, each) == expected
    assert set(counted.sizes) >= {(8, 5), (16, 5)}
    assert counted.num_without == 1


def test_preemption_and_prefix_hits(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint("llama")
    texts = prompts((20, 15, 9), seed=6)
    texts.append(texts[0][:16] + texts[1])
    options = schedule(16, 4, 1, num_tokens=52, cached=True) | {"max_num_seqs": 4}
    params = replace(GREEDY, max_tokens=14)
    expected = Engine(folder, **(options | {"num_pages": 400})).run(texts, params)
    use_fake_cuda(monkeypatch)
    engine = Engine(folder, device="cuda", **options)
    counted = Counted(monkeypatch)
    assert engine.run(texts, params) == expected
    assert engine.run(texts, params) == expected
    assert counted.num_without == 0
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.scheduler.stats().num_cached_tokens > 0


def test_drafts_beside_chunks(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes with drafts have a row for each token; the graphs have room for all of them."""
    folder, _ = checkpoint("llama")
    text = prompts((6,), seed=7)[0]
    texts = [text * 3, text * 2, prompts((14,), seed=8)[0]]
    options = schedule(16, 4, 1, num_tokens=200) | {"max_num_seqs": 3}
    params = replace(GREEDY, max_tokens=10)
    expected = Engine(folder, **options).run(texts, params)
    use_fake_cuda(monkeypatch)
    speculative = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    engine = Engine(folder, device="cuda", speculative_config=speculative, **options)
    counted = Counted(monkeypatch)
    assert engine.run(texts, params) == expected
    assert counted.num_without == 0
    assert any(size.num_rows == 13 for size in counted.sizes)


def test_models_that_cannot(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs of their own, steps with chunks are launched one by one."""
    folder, _ = checkpoint("llama")
    monkeypatch.setattr(model_runner, "can_mix", lambda model, kv: False)
    use_fake_cuda(monkeypatch)
    engine = Engine(folder, device="cuda", **schedule(16, 4, 1, num_tokens=200))
    counted = Counted(monkeypatch)
    engine.run(prompts((9,)), GREEDY)
    assert counted.num_without == 1
    assert not counted.sizes
