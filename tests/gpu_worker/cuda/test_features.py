"""What else must hold on a GPU: graphs against eager steps, seeds, log-probabilities, memory, a whole start."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.config import ConfigError
from penstock.gpu_worker.startup.start import start
from penstock.ipc.messages import SamplingParams, TokenLogprobs
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, make_config, schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

Make = Callable[..., Checkpoint]

PROMPTS = prompts((1, 33, 17, 64, 133), seed=1)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=2**61 + 7)
KINDS = {
    "plain": SEEDED,
    "filters": replace(SEEDED, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": replace(SEEDED, repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.3),
    "edits": replace(SEEDED, logit_bias=((5, 2.0), (9, -3.0)), min_tokens=6, stop_token_ids=(5, 9)),
}


def engine_on_gpu(checkpoint: Make, name: str = "llama", **options: Any) -> Engine:
    chosen = schedule(64, 16, 1, num_tokens=6400) | {"device": "cuda", "dtype": "float32"} | options
    return Engine(checkpoint(name)[0], **chosen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_tokens_in_any_batch(checkpoint: Make, kind: str) -> None:
    """Alone, together, with graphs and without, preempted, and on the CPU."""
    each = [replace(KINDS[kind], seed=KINDS[kind].seed + i) for i in range(len(PROMPTS))]
    together = engine_on_gpu(checkpoint).run(PROMPTS, each)
    eager = engine_on_gpu(checkpoint, enforce_eager=True)
    assert eager.run(PROMPTS, each) == together
    assert [eager.run([prompt], params)[0] for prompt, params in zip(PROMPTS, each, strict=True)] == together
    tight = engine_on_gpu(checkpoint, **schedule(64, 16, 2, num_tokens=133 + 24 + 20))
    assert tight.run(PROMPTS, each) == together
    assert kind == "edits" or tight.scheduler.stats().num_preemptions > 0  # some of those stop early
    assert engine_on_gpu(checkpoint, device="cpu").run(PROMPTS, each) == together


def test_graphs_equal_eager_steps_in_bf16(checkpoint: Make) -> None:
    """Steps of the sizes of graphs, so that matrix products have the same shapes: then the tokens are the same."""
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    batch = [PROMPTS[4]] * 8
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 8 * len(PROMPTS[4])}
    outputs = [
        engine_on_gpu(checkpoint, "qwen3", dtype="bfloat16", enforce_eager=eager, **sizes).run(batch, greedy)
        for eager in (False, True)
    ]
    assert outputs[0] == outputs[1]


def values(scores: TokenLogprobs | None) -> tuple[list[int], np.ndarray[Any, Any]]:
    assert scores is not None
    return np.frombuffer(scores.token_ids, np.int32).tolist(), np.frombuffer(scores.logprobs, np.float32)


def test_logprobs_equal_the_cpu_path(checkpoint: Make) -> None:
    asking = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=5, prompt_logprobs=2)
    found = []
    for device in ("cuda", "cpu"):
        engine = engine_on_gpu(checkpoint, device=device, **schedule(512, 16, 0, num_tokens=6400))
        engine.run(PROMPTS[1:], asking)
        found.append([engine.last_delta[f"r{i}", 0] for i in range(len(PROMPTS) - 1)])
    for on_gpu, on_cpu in zip(*found, strict=True):
        for ours, theirs in ((on_gpu.logprobs, on_cpu.logprobs), (on_gpu.prompt_logprobs, on_cpu.prompt_logprobs)):
            (ids, scores), (expected_ids, expected) = values(ours), values(theirs)
            assert ids == expected_ids
            np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_the_pool_is_sized_from_memory(checkpoint: Make) -> None:
    engine = engine_on_gpu(checkpoint, num_pages=0, page_size=1024, gpu_memory_utilization=0.6)
    free, total = torch.cuda.mem_get_info()
    assert engine.hello.num_pages > 1000
    assert total - free < 0.7 * total
    assert engine.run([PROMPTS[1]], SEEDED)


def test_too_little_memory_is_a_clear_refusal(checkpoint: Make) -> None:
    folder, _ = checkpoint("llama")
    with pytest.raises(ConfigError, match="--num-pages"):
        start(make_config(folder, device="cuda", num_pages=1 << 33))
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        start(make_config(folder, device="cuda", num_pages=0, gpu_memory_utilization=0.001))


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "auto"])
def test_every_name_of_the_device(checkpoint: Make, wanted: str) -> None:
    assert engine_on_gpu(checkpoint, device=wanted, enforce_eager=True).hello.device == torch.cuda.get_device_name(0)
