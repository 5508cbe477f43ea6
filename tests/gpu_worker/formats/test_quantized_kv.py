"""Quantized keys and values: the same tokens in every schedule, more pages, and models that cannot have them.

A position's codes come from its own values alone, and the native kernels compute these with the same bits in any batch.
Any two settings meet by default, all combinations in soak.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.config import ConfigError
from penstock.config.options import ModelImpl
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.gpu_worker.state.kv_pool import KVPool, PageGroup, page_bytes, page_groups
from penstock.ipc.messages import SamplingParams
from penstock.kernels.attention.kv_quantization import KV_FORMATS
from penstock.lab.planning.costs import kv_head_bytes
from penstock.models.check import check_checkpoint
from penstock.models.finding.registry import open_checkpoint
from penstock.parts.disk.scheduler import moves as disk_moves
from penstock.parts.disk.scheduler.moves import DiskMoves
from tests.gpu_worker.checkpoints import prompts
from tests.gpu_worker.conftest import Checkpoint
from tests.gpu_worker.engine_in_process import Engine, schedule
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.transformers_checkpoints import make_checkpoint as make_by_transformers
from tests.kernels.pairs import every
from tests.parts.host.test_host_moves import totals_of

Make = Callable[..., Checkpoint]

FORMATS = tuple(KV_FORMATS)
PROMPTS = prompts((1, 45, 17, 64, 133), seed=1)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, presence_penalty=0.2, seed=11)
GIB = 2**-8  # of the host: 4 MiB


def together(engine: Engine) -> list[list[int]]:
    """The greedy prompts, and a seeded one."""
    outputs = engine.run([*PROMPTS, PROMPTS[1]], [*[GREEDY] * len(PROMPTS), SEEDED], n=2)
    assert all(first == second for first, second in outputs[:-1])
    return [first for first, _ in outputs] + [outputs[-1][1]]


def alone(folder: Path, name: str) -> list[list[int]]:
    """The same one by one, each prompt in one step."""
    engine = Engine(folder, **schedule(4096, 16, 0, num_tokens=6400), cpu_kernels="native", kv_cache_dtype=name)
    found = [engine.run([prompt], GREEDY)[0][0] for prompt in PROMPTS]
    return found + engine.run([PROMPTS[1]], SEEDED, n=2)[0]


@pytest.mark.parametrize(
    ("name", "of_model", "kind", "cached", "depth", "page_size", "budget"),
    every(
        FORMATS,
        ("llama", "qwen3-layer-types"),
        ("recompute", "swap", "auto"),
        (False, True),
        (0, 1, 2),
        (1, 16),
        (16, 64),
    ),
)
def test_tokens_do_not_depend_on_the_schedule(
    checkpoint: Make, name: str, of_model: str, kind: str, cached: bool, depth: int, page_size: int, budget: int
) -> None:
    """Chunks, batches, pages, forks, cached prefixes, the host tier, preemption; with a cache, all of it twice."""
    folder = checkpoint(of_model)[0]
    expected = alone(folder, name)
    num_tokens = 300 if of_model == "qwen3-layer-types" else 133 + GREEDY.max_tokens + 20
    options = schedule(budget, page_size, depth, num_tokens=num_tokens, cached=cached)
    engine = Engine(
        folder, **options, cpu_kernels="native", preemption=kind, host_kv_gib=GIB, kv_cache_dtype=name
    )  # fmt: skip
    for _ in range(1 + cached):
        assert together(engine) == expected
    assert engine.scheduler.totals.num_preemptions > 0
    if kind == "swap":
        assert totals_of(engine.scheduler).num_swapped_in == engine.scheduler.totals.num_preemptions


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_torch_gives_the_same_tokens(checkpoint: Make, name: str) -> None:
    """Its sums depend on the batch, so a code may be its neighbour in another one: too little for 8 bits to show."""
    folder = checkpoint("llama")[0]
    expected = alone(folder, name)
    for options in (schedule(64, 16, 1, num_tokens=400, cached=True), schedule(4096, 1, 0, num_tokens=6400)):
        assert together(Engine(folder, **options, cpu_kernels="torch", kv_cache_dtype=name)) == expected


@pytest.mark.parametrize("name", ["auto", "int8"])
def test_a_disk_keeps_pages_of_each_type_apart(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(disk_moves, "MIN_STORED_TOKENS", 16)
    folder = checkpoint("llama")[0]
    options = {"disk_kv": f"{tmp_path}:0.1", "num_pages": 60, "pipeline_depth": 1}
    expected = [Engine(folder, kv_cache_dtype=name).run([prompt], GREEDY)[0][0] for prompt in PROMPTS]
    for of_others in ("fp8_e4m3", "int4", name):  # of fp8 e4m3 and e5m2, pages have as many bytes as of int8
        engine = Engine(folder, **options, kv_cache_dtype=of_others)
        try:
            disk = engine.scheduler.parts.get(DiskMoves)
            assert disk is not None
            disk._predict_us = lambda start, num_tokens: 0.0
            assert engine.scheduler.stats().disk.num_cached == 0
            for prompt in PROMPTS:
                engine.run([prompt], GREEDY)
        finally:
            engine.close()
    engine = Engine(folder, **options, kv_cache_dtype=name)
    try:
        disk = engine.scheduler.parts.get(DiskMoves)
        assert disk is not None
        disk._predict_us = lambda start, num_tokens: 0.0
        assert engine.scheduler.stats().disk.num_cached > 0
        assert [engine.run([prompt], GREEDY)[0][0] for prompt in PROMPTS] == expected
        assert engine.scheduler.stats().disk.num_loaded > 0
    finally:
        engine.close()


def test_the_same_memory_has_more_pages(checkpoint: Make) -> None:
    folder = checkpoint("llama", head_dim=64)[0]
    counts = {
        name: Engine(folder, num_pages=0, cpu_kv_cache_gib=0.01, kv_cache_dtype=name, cpu_kernels="torch").hello
        for name in ("auto", *FORMATS)
    }
    float32 = counts["auto"].num_pages
    assert counts["int8"].num_pages >= 2 * 1.9 * float32  # of bfloat16, there are twice as many as of float32
    assert counts["fp8_e5m2"].num_pages == counts["fp8_e4m3"].num_pages == counts["int8"].num_pages
    assert counts["int4"].num_pages >= 2 * 3.1 * float32
    assert counts["int8"].dtype == "float32, KV int8"
    assert counts["auto"].dtype == "float32"
    assert counts["int8"].page_bytes == 2 * 2 * 2 * 16 * 66


@pytest.mark.parametrize("name", FORMATS)
def test_pages_of_groups_with_other_heads(name: str) -> None:
    """Larger heads have fewer scales for a page: what they do not need stays unused."""
    groups = (PageGroup((0,), 16, 2, 64), PageGroup((1,), 4, 4, 128, 20), PageGroup((2,), 32, 1, 64, 20))
    pool = KVPool(groups, 3, KV_FORMATS[name], torch.device("cpu"))
    assert pool.blocks.nbytes == 3 * page_bytes(groups, KV_FORMATS[name]) == 3 * pool.page_bytes
    for group, layer in zip(groups, pool.layers, strict=True):
        assert layer.layout is not None
        assert layer.keys.shape[:2] == (3, group.num_kv_heads)
        assert layer.keys.shape[2] >= layer.layout.used_bytes
        assert layer.keys.is_contiguous()
        layer.layout.scales(layer.values).fill_(1.0)
        assert group.bytes_per_token(KV_FORMATS[name]) * group.page_size <= pool.page_bytes


def test_auto_is_the_type_of_activations(checkpoint: Make) -> None:
    model = load_model_config(checkpoint("llama")[0])
    groups = page_groups(model, 16)
    assert KVPool(groups, 1, torch.bfloat16, torch.device("cpu")).layers[0].layout is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: Reference(folder, CASES["deepseek_v3"]), "DeepseekV3.*latents"),
        (lambda folder: make_by_transformers(folder, "persimmon"), "transformers' code"),
    ],
)
def test_models_that_cannot_have_them(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    """Said before a process starts."""
    make(tmp_path)
    impl: ModelImpl = "transformers" if "code" in why else "auto"
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype int8 is not supported .*{why}"):
        check_checkpoint(open_checkpoint(tmp_path), impl, "", "int8", with_tokenizer=False)
    check_checkpoint(open_checkpoint(tmp_path), impl, with_tokenizer=False)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_plans_count_the_same_bytes(head_dim: int) -> None:
    for name, of_plan in (("fp8_e4m3", "fp8"), ("fp8_e5m2", "fp8"), ("int8", "int8"), ("int4", "int4")):
        assert kv_head_bytes(of_plan, head_dim) == KV_FORMATS[name].head_bytes(head_dim)
