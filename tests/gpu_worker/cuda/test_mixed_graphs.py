"""Steps with chunks of prompts in graphs, on a GPU: in fp32 they give the tokens of steps without, one for one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.ipc.messages import SamplingParams
from tests.gpu_worker.checkpoints import greedy_errors, prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.counted_graphs import Counted
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.table import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

Make = Callable[..., Checkpoint]

LENS = (1, 2, 62, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 300, 380)
"""Around the sizes of graphs."""
PROMPTS = prompts(LENS)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SAMPLING = (GREEDY, replace(GREEDY, temperature=0.8, top_p=0.9, seed=11), replace(GREEDY, num_logprobs=3))
MIXABLE = ["gemma3", "gpt_oss", "qwen3_moe", "gpt2", "phi3-longrope-long", "llama4-chunks"]
NOT_MIXABLE = ["deepseek_v2-lite", "mamba2", "qwen3_next", "falcon_h1"]


def on_gpu(folder: Path, **options: Any) -> Engine:
    chosen: dict[str, Any] = schedule(512, 16, 1, num_tokens=8000) | {"device": "cuda", "dtype": "float32"}
    return Engine(folder, **(chosen | options))


@pytest.mark.parametrize("name", ["llama", "llama-dynamic", "mistral-window", "qwen2-some-windows", "qwen3"])
def test_they_equal_steps_without(checkpoint: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One prompt after the other, and all at once beside decodes; greedy tokens are transformers', too."""
    folder, model = checkpoint(name)
    each = [SAMPLING[i % len(SAMPLING)] for i in range(len(PROMPTS))]
    expected = on_gpu(folder, enforce_eager=True).run(PROMPTS, each)
    engine = on_gpu(folder)
    counted = Counted(monkeypatch)
    assert [engine.run([text], params)[0] for text, params in zip(PROMPTS, each, strict=True)] == expected
    assert engine.run(PROMPTS, each) == expected
    assert counted.num_without == 0
    assert len({size.num_tokens for size in counted.sizes}) >= 4
    assert len({size.num_rows for size in counted.sizes}) >= 2
    for text, (output,) in list(zip(PROMPTS, expected, strict=True))[:: len(SAMPLING)]:
        assert greedy_errors(model, text, output)[0] == []


@pytest.mark.parametrize("name", [*MIXABLE, *NOT_MIXABLE])
def test_families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Those that cannot be captured go without."""
    Reference(tmp_path, CASES[name])
    texts = prompts((9, 40, 63, 65, 90), seed=4)
    options = {"model_impl": "own", **schedule(128, 16, 1, num_tokens=2000)}
    expected = on_gpu(tmp_path, enforce_eager=True, **options).run(texts, GREEDY)
    engine = on_gpu(tmp_path, **options)
    counted = Counted(monkeypatch)
    assert engine.run(texts, GREEDY) == expected
    assert (counted.num_without == 0) == bool(counted.sizes) == (name in MIXABLE)


def test_preemption_and_prefix_hits(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint("qwen3")
    texts = [*PROMPTS, PROMPTS[-1][:200] + PROMPTS[5]]
    params = replace(GREEDY, max_tokens=40)
    expected = on_gpu(folder, enforce_eager=True).run(texts, params)
    tight = on_gpu(folder, **schedule(128, 4, 2, num_tokens=520, cached=True))
    counted = Counted(monkeypatch)
    assert tight.run(texts, params) == expected
    assert tight.run(texts, params) == expected
    assert counted.num_without == 0
    assert tight.scheduler.stats().num_preemptions > 0
    assert tight.scheduler.stats().num_cached_tokens > 0


def test_drafts(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft token has a row: all 16 sequences verify theirs in one graph."""
    folder, _ = checkpoint("llama")
    part = prompts((20,), seed=9)[0]
    texts = [part * (1 + i % 4) + part[: i + 1] for i in range(16)]
    params = replace(GREEDY, max_tokens=24)
    expected = on_gpu(folder, enforce_eager=True).run(texts, params)
    speculative = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    engine = on_gpu(folder, speculative_config=speculative)
    counted = Counted(monkeypatch)
    assert engine.run(texts, params) == expected
    assert counted.num_without == 0
