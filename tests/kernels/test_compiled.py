"""Every kernel compiles as real models launch it, for each kind of card: no register spills, shared memory in bounds.

The launchers run on tensors without storage and their launches are recorded, so tile sizes, specialisations
and constants are those of a GPU run. Nothing here needs a GPU.
"""

import functools
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton

from penstock.kernels.attention.kv_quantization import KV_FORMATS, PageLayout
from penstock.kernels.attention.qk_norm_rope_write import QKNorms
from penstock.kernels.attention.ragged_attention import RaggedRows
from penstock.kernels.experts.routing import Routing
from penstock.kernels.norms import NormWeights
from penstock.kernels.sampling.sampling_state import SamplingNeeds, SamplingState
from penstock.kernels.triton import device
from penstock.kernels.triton.activation import activation_triton, gated_activation_triton
from penstock.kernels.triton.adapting import add_low_rank_triton, group_by_slot_triton
from penstock.kernels.triton.attention import paged_attention
from penstock.kernels.triton.attention.copy_pages import copy_pages_triton
from penstock.kernels.triton.attention.qk_norm_rope_write import qk_norm_rope_write_triton
from penstock.kernels.triton.attention.ragged_attention import ragged_attention_triton
from penstock.kernels.triton.experts import experts
from penstock.kernels.triton.experts.experts import group_rows_triton, grouped_linear_triton, sum_of_experts_triton
from penstock.kernels.triton.experts.logits import router_logits_triton
from penstock.kernels.triton.experts.routing import route_triton
from penstock.kernels.triton.latents import attention as latent_attention
from penstock.kernels.triton.latents import expanded as latent_expanded
from penstock.kernels.triton.latents.choice import choose_triton, keep_index_keys_triton
from penstock.kernels.triton.latents.write import latent_write_triton
from penstock.kernels.triton.norms import add_norm_triton, norm_triton
from penstock.kernels.triton.prepare_inputs import prepare_inputs_triton
from penstock.kernels.triton.quantized import linear as quantized_linear
from penstock.kernels.triton.quantized import many_rows
from penstock.kernels.triton.row_updates import write_runs_triton
from penstock.kernels.triton.sampling.sampling import sample_triton
from penstock.kernels.triton.sampling.top_logprobs import top_logprobs_triton
from tests.faults.soak import IS_SOAK
from tests.kernels.launch_recorder import Launch, Resources, compile_launch, recording
from tests.kernels.quantized_launches import launch_quantized
from tests.kernels.scan_launches import launch_scans

Job = tuple[int, str]
"""(the capability for which a launch is compiled, its key)."""


class ModelShape(NamedTuple):
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    qk_norm: bool
    window: int | None


MODELS = {
    "Llama-3.1-8B": ModelShape(32, 8, 128, 4096, 14336, 128256, False, None),
    "Qwen3-0.6B": ModelShape(16, 8, 128, 1024, 3072, 151936, True, None),
    "Qwen3-8B": ModelShape(32, 8, 128, 4096, 12288, 151936, True, None),
    "Mistral-7B": ModelShape(32, 8, 128, 4096, 14336, 32000, False, 4096),
}
ON_80 = ("Llama-3.1-8B", "Qwen3-0.6B", "gpt-oss-20b", "DeepSeek-V2")
"""What is compiled for sm_80 by default."""
CAPABILITIES = {
    80: device.DeviceFacts(108, (8, 0)),
    86: device.DeviceFacts(84, (8, 6)),
    89: device.DeviceFacts(128, (8, 9)),
    90: device.DeviceFacts(132, (9, 0)),
}
if IS_SOAK:
    CAPABILITIES |= {100: device.DeviceFacts(148, (10, 0)), 120: device.DeviceFacts(188, (12, 0))}
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
ALIKE = (80, 86, 89)
"""For these, the compiler makes the same of a launch up to the last step, so each form is compiled for one of them."""


class ExpertsShape(NamedTuple):
    num_experts: int
    hidden: int
    size: int
    has_bias: bool
    routing: Routing


MIXTURES = {
    "Mixtral-8x7B": ExpertsShape(8, 4096, 14336, False, Routing(2, renormalize=True)),
    "Qwen3-30B-A3B": ExpertsShape(128, 2048, 768, False, Routing(8, renormalize=True)),
    "gpt-oss-20b": ExpertsShape(32, 2880, 2880, True, Routing(4, kind="top_softmax")),
    "DeepSeek-V2": ExpertsShape(160, 5120, 1536, False, Routing(6, num_groups=8, top_groups=3, group_judge="max")),
    "DeepSeek-V3": ExpertsShape(
        256, 7168, 2048, False, Routing(8, kind="sigmoid", renormalize=True, num_groups=8, top_groups=4)
    ),
}
# Unusual shapes, taken with softcap and sinks.
ODD = {
    "head_dim 256": ModelShape(8, 4, 256, 2304, 9216, 256000, False, 4096),
    "softcap 128": ModelShape(32, 16, 128, 4608, 36864, 256000, False, 4096),
    "head_dim 80": ModelShape(32, 32, 80, 2560, 10240, 51200, False, None),
    "chunks": ModelShape(40, 8, 128, 5120, 8192, 202048, False, -8192),
    "group 7": ModelShape(14, 2, 64, 896, 4864, 151936, False, None),
    "group 71": ModelShape(71, 1, 64, 4544, 18176, 65024, False, None),
}
ODD_ON = {"head_dim 256": (86, 90), "softcap 128": (80, 90), "group 71": (86,)}
"""Where they are compiled by default, which takes seconds for each; the others for 90."""
QUANTIZED: dict[str, dict[int, tuple[str, ...]]] = {
    "Llama-3.1-8B": {80: ("fp8_e4m3",), 89: ("fp8_e4m3",), 90: ("int8", "int4")},
    "head_dim 256": {86: ("int8",), 90: ("int4",)},
}
"""Formats of quantized KV that are compiled by default, which takes seconds for each."""
GEMMAS = {
    "Gemma-3-4B, a window": ModelShape(8, 4, 256, 2560, 10240, 262208, True, 1024),
    "Gemma-3-27B": ModelShape(32, 16, 128, 5376, 21504, 262208, True, None),
}
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 192, 256, 512)
# kv_rank 512, 64 rotated numbers, and per head (heads, nope_dim, v_dim).
LATENT = {
    "DeepSeek-V2-Lite": (16, 128, 128),
    "GLM-4.7-Flash": (20, 192, 256),
    "DeepSeek-V3": (128, 128, 128),
}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def kv_pages(shape: ModelShape, layout: PageLayout | None, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values."""
    if layout is None:
        kv = meta(4, 2, 4096, shape.num_kv_heads, page_size, shape.head_dim)
    else:
        kv = meta(4, 2, 4096, shape.num_kv_heads, layout.used_bytes, dtype=torch.uint8)
    return kv[1, 0], kv[1, 1]


def launch_attention(shape: ModelShape, page_size: int = 16, extras: bool = False, kv_format: str = "") -> None:
    layout = PageLayout(KV_FORMATS[kv_format], page_size, shape.head_dim) if kv_format else None
    pages = kv_pages(shape, layout, page_size)
    # One row splits its context, 256 do not.
    for batch, query_len in ((1, 1), (4, 512)) if extras or kv_format else ((1, 1), (256, 1), (4, 512)):
        # The launch for single-query rows of a mixed batch is that of a decode batch.
        q = meta(batch * query_len, shape.num_q_heads, shape.head_dim)
        paged_attention.paged_attention_triton(
            q, *pages, ints(batch, 512), ints(batch + 1), ints(batch),
            scale=0.1, max_query_len=query_len, max_seq_len=8192, window=shape.window,
            softcap=30.0 if extras else 0.0, sinks=meta(shape.num_q_heads, dtype=torch.float32) if extras else None,
            layout=layout,
        )  # fmt: skip


def launch_seeing_ahead(shape: ModelShape) -> None:
    """A chunk with a picture whose positions see each other."""
    paged_attention.paged_attention_triton(
        meta(512, shape.num_q_heads, shape.head_dim), *kv_pages(shape, None, 16), ints(1, 512), ints(2), ints(1),
        scale=0.1, max_query_len=512, max_seq_len=8192, window=shape.window, last_seen=ints(512),
    )  # fmt: skip


def launch_write(shape: ModelShape, kv_format: str = "") -> None:
    heads = shape.num_q_heads + 2 * shape.num_kv_heads
    head_norm = NormWeights(meta(shape.head_dim)) if shape.qk_norm else None
    norms = QKNorms(head_norm, head_norm)
    layout = PageLayout(KV_FORMATS[kv_format], 16, shape.head_dim) if kv_format else None
    pages = kv_pages(shape, layout, 16)
    cos_sin = meta(8192, shape.head_dim, dtype=torch.float32)
    for tokens in (1, 4096):
        positions = meta(tokens, dtype=torch.int64)
        qkv = meta(tokens, heads * shape.head_dim)
        qk_norm_rope_write_triton(qkv, positions, cos_sin, norms, *pages, positions, layout=layout)


def launch_rest(shape: ModelShape) -> None:
    launch_write(shape)
    x = meta(16, shape.hidden)
    weights = NormWeights(meta(shape.hidden))
    norm_triton(x, weights)
    add_norm_triton(x, x, weights)
    gated_activation_triton(meta(16, 2 * shape.intermediate), "silu")


def launch_experts(shape: ExpertsShape) -> None:
    correction = meta(shape.num_experts, dtype=torch.float32) if shape.routing.kind == "sigmoid" else None
    gate_up, down = (
        meta(shape.num_experts, 2 * shape.size, shape.hidden),
        meta(shape.num_experts, shape.hidden, shape.size),
    )
    biases = [meta(*weight.shape[:2]) if shape.has_bias else None for weight in (gate_up, down)]
    # One token, a block of an expert's few tokens, and many: most mixtures need no more than the first.
    for tokens in (1, 8 * shape.num_experts, 8192) if shape.hidden < 4096 else (1,):
        router_logits_triton(meta(16, shape.hidden), meta(shape.num_experts, shape.hidden, dtype=torch.float32), None)
        ids, weights = route_triton(meta(tokens, shape.num_experts, dtype=torch.float32), shape.routing, correction)
        grouped = group_rows_triton(ids, shape.num_experts)
        rows = grouped_linear_triton(meta(tokens, shape.hidden), grouped, gate_up, biases[0], of_tokens=True)
        rows = grouped_linear_triton(rows[:, : shape.size].contiguous(), grouped, down, biases[1])
        sum_of_experts_triton(rows, grouped, weights)
        sum_of_experts_triton(rows, group_rows_triton(ids, shape.num_experts, are_some=True), weights)


def launch_adapting(shape: ModelShape, most_rank: int) -> None:
    """A product whose outputs are in three segments, and one whose outputs are not, in steps of each size of blocks."""
    for tokens in (1, 600, 4096):
        grouped = group_by_slot_triton(ints(8), ints(9), ints(257), tokens, 32)
        for segments in (3, 1) if tokens == 1 else (3,):
            x, y = meta(tokens, shape.hidden), meta(tokens, 2 * shape.hidden)
            addresses = meta(32, 9, 2, dtype=torch.int64)[:, 4 : 4 + segments]
            ranks = ints(32, 9)[:, 4 : 4 + segments]
            add_low_rank_triton(x, y, addresses, ranks, ints(9, 2)[4:], shape.hidden, most_rank, grouped)


def launch_latent(num_heads: int, nope_dim: int, v_dim: int) -> None:
    pages = meta(4, 1, 4096, 1, 16, 576)[0, 0]
    for batch, query_len in ((1, 1), (256, 1), (4, 8)):
        latent_attention.latent_attention_triton(
            meta(batch * query_len, num_heads, 576), pages, ints(batch, 512), ints(batch + 1), ints(batch),
            kv_rank=512, scale=0.1, max_query_len=query_len, max_seq_len=8192,
        )  # fmt: skip
    tokens = meta(4096, dtype=torch.int64)
    for count in (1, 4096):  # of chosen positions
        latent_attention.latent_attention_triton(
            meta(count, num_heads, 576), meta(65536, 1, 1, 704), ints(count, 2048), ints(count + 1), ints(count),
            kv_rank=512, scale=0.1, max_query_len=1, max_seq_len=2048,
        )  # fmt: skip
    q = meta(4096, num_heads, nope_dim + 64)
    latent_expanded.expanded_attention_triton(
        q[:, :8], meta(9000, 8, nope_dim + v_dim), meta(9000, 576)[:, 512:], ints(5), ints(5),
        scale=0.1, max_query_len=1024, out=meta(4096, num_heads, v_dim)[:, :8],
    )  # fmt: skip
    cos_sin = meta(8192, 64, dtype=torch.float32)
    for count in (1, 4096):
        latent_write_triton(
            meta(count, 576), q[:count], tokens[:count], cos_sin, meta(512), 1e-6, pages, tokens[:count]
        )


def launch_indexer() -> None:
    """Of DeepSeek-V3.2 and GLM-5."""
    pages = meta(4, 1, 4096, 1, 16, 704)[0, 0]
    for num_heads in (64, 32):
        for batch, query_len in ((1, 1), (256, 1), (4, 8)):
            tokens = batch * query_len
            choose_triton(
                meta(tokens, num_heads, 128), meta(tokens, num_heads, dtype=torch.float32), pages, ints(batch, 512),
                ints(batch + 1), ints(batch), top_k=2048, max_seq_len=8192,
            )  # fmt: skip
    keep_index_keys_triton(meta(4096, 65, 128)[:, -1], pages, meta(4096, dtype=torch.int64))


def launch_shapeless() -> None:
    x, weight = meta(16, 8192), meta(8192, dtype=torch.float32)
    add_norm_triton(x, x, NormWeights(weight), post=NormWeights(weight))
    add_norm_triton(x, x, NormWeights(meta(8192), kind="layer", bias=meta(8192)), scale=0.2)
    for kind in ("gelu", "gelu_tanh", "clamped_swiglu"):
        gated_activation_triton(meta(16, 20480), kind)
    activation_triton(meta(16, 20480), "relu2")
    for num_heads, head_dim, reach in ((12, 32, None), (12, 64, 64), (16, 64, None)):  # MiniLM, ModernBERT, BGE
        rows = RaggedRows(np.full(8, 512), ints(9))
        ragged_attention_triton(meta(4096, 3, num_heads, head_dim), rows, 0.1, reach)
    copy_pages_triton(meta(8, 4096, 8 * 16 * 128), ints(3), ints(3))
    write_runs_triton(ints(256, 4097), ints(5), ints(5), ints(5), ints(999))
    table, ids = ints(256, 512), ints(256, 4097)
    prepare_inputs_triton(ints(256), ints(256), ints(256), 256, ids, table, 16)
    prepare_inputs_triton(ints(8), ints(8), ints(8), 8192, ids, table, 16)


def launch_sampling(vocab: int) -> None:
    rows = 256
    real, whole = meta(rows, dtype=torch.float32), meta(rows, dtype=torch.int64)
    state = SamplingState(
        temperature=real, top_p=real, min_p=real, repetition_penalty=real, presence_penalty=real,
        frequency_penalty=real, seed=whole, top_k=whole, min_tokens=whole, num_prompt_tokens=whole,
        token_ids=ints(rows, 4097), stop_ids=ints(rows, 8), bias_ids=ints(rows, 300),
        bias_values=meta(rows, 300, dtype=torch.float32),
    )  # fmt: skip
    logits = meta(64, vocab, dtype=torch.float32)
    for needs in (SamplingNeeds(), SamplingNeeds(*[True] * 7)):
        sample_triton(logits, whole[:64], whole[:64], state, needs)
    top_logprobs_triton(logits, whole[:64], 20)


def job_list(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[Job, Launch], dict[int, set[Job]]]:
    """(what is compiled, which of it each capability runs)."""
    jobs: dict[Job, Launch] = {}
    forms: dict[int, set[Job]] = {capability: set() for capability in CAPABILITIES}
    for capability, facts in CAPABILITIES.items():
        for module in (paged_attention, latent_attention, latent_expanded, experts, quantized_linear, many_rows):
            monkeypatch.setattr(module, "device_facts", functools.partial(lambda facts, _: facts, facts))
        with recording(monkeypatch.setattr) as launches:
            for name, shape in ODD.items():
                if IS_SOAK or capability in ODD_ON.get(name, (90,)):
                    launch_attention(shape, page_size=64, extras=True)
            for name, shape in GEMMAS.items():
                if IS_SOAK or (capability, name) == (90, "Gemma-3-4B, a window"):
                    launch_seeing_ahead(shape)
            for name, shape in (MODELS | ODD).items():
                formats = KV_FORMATS if IS_SOAK else QUANTIZED.get(name, {}).get(capability, ())
                for kv_format in formats:
                    launch_attention(shape, 64 if name in ODD else 16, name in ODD, kv_format)
                    launch_write(shape, kv_format)
            for size in HEAD_SIZES if IS_SOAK else ():
                for window, extras in product((None, 1024, -8192), (False, True)):
                    launch_attention(ModelShape(16, 2, size, 0, 0, 0, False, window), extras=extras)
            is_whole = IS_SOAK or capability == 90
            for name, shape in MODELS.items():
                if is_whole or name in ON_80:
                    launch_attention(shape)
                    launch_rest(shape)
            for name, mixture in MIXTURES.items():
                if is_whole or name in ON_80:
                    launch_experts(mixture)
            for name, sizes in LATENT.items():
                if capability == 90 or name == "DeepSeek-V2-Lite":
                    launch_latent(*sizes)
            launch_indexer()
            launch_adapting(MODELS["Llama-3.1-8B"], 256)
            if IS_SOAK:
                launch_adapting(MODELS["Qwen3-0.6B"], 16)
            launch_shapeless()
            launch_quantized()
            launch_scans()
            launch_sampling(151936)
        for launch in launches:
            alike = ALIKE if capability in ALIKE else (capability,)
            job = next(
                ((other, launch.key) for other in alike if (other, launch.key) in jobs), (capability, launch.key)
            )
            jobs[job] = launch
            forms[capability].add(job)
    return jobs, forms


def compile_job(job: Job) -> tuple[Job, Resources]:
    """In a worker process, which makes the list again: a kernel object does not travel."""
    return job, compile_launch(JOBS[job], job[0])


JOBS: dict[Job, Launch] = {}
FORMS: dict[int, set[Job]] = {}


def fill_jobs() -> None:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the present default; unset, newer releases warn
    with pytest.MonkeyPatch.context() as monkeypatch:
        jobs, forms = job_list(monkeypatch)
        JOBS.update(jobs)
        FORMS.update(forms)


@pytest.fixture(scope="module")
def resources() -> Iterator[dict[Job, Resources]]:
    fill_jobs()
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context, initializer=fill_jobs) as pool:
        yield dict(pool.map(compile_job, list(JOBS), chunksize=4))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_register_spills(resources: dict[Job, Resources]) -> None:
    spilled = {job: used for job, used in resources.items() if used.stack_bytes}
    assert not spilled


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_shared_memory_in_bounds(resources: dict[Job, Resources], capability: int) -> None:
    used = {job: resources[job].shared_bytes for job in FORMS[capability]}
    assert used
    assert max(used.values()) <= SHARED_LIMIT[capability], {
        j: s for j, s in used.items() if s > SHARED_LIMIT[capability]
    }


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_kernel_is_compiled(resources: dict[Job, Resources]) -> None:
    folder = Path(device.__file__).parent
    source = "".join(file.read_text() for file in folder.rglob("*.py"))
    defined = set(re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE))
    assert len(defined) > 10
    for capability in CAPABILITIES:
        assert {key.split()[0] for _, key in FORMS[capability]} == defined


def test_grids_of_a_million_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and the third axis of a grid end at 65535."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        triton.runtime.JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: grids.append(grid)
    )
    facts = CAPABILITIES[90]
    for module in (paged_attention, latent_attention, latent_expanded):
        monkeypatch.setattr(module, "device_facts", lambda _: facts)
    tokens = 1 << 20
    paged_attention.paged_attention_triton(
        meta(tokens, 64, 128), meta(4096, 8, 16, 128), meta(4096, 8, 16, 128), ints(1, 65536), ints(2), ints(1),
        scale=0.1, max_query_len=tokens, max_seq_len=tokens,
    )  # fmt: skip
    latent_attention.latent_attention_triton(
        meta(tokens, 128, 576), meta(4096, 1, 16, 576), ints(1, 65536), ints(2), ints(1),
        kv_rank=512, scale=0.1, max_query_len=tokens, max_seq_len=tokens,
    )  # fmt: skip
    latent_expanded.expanded_attention_triton(
        meta(tokens, 8, 192), meta(tokens, 8, 256), meta(tokens, 64), ints(2), ints(2),
        scale=0.1, max_query_len=tokens, out=meta(tokens, 8, 128), tiles=latent_expanded.ExpandedTiles(16, 16, 4, 1),
    )  # fmt: skip
    assert len(grids) >= 3
    assert all(size <= 65535 for grid in grids for size in grid[1:])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_prefill_tile_holds_all_queries_of_a_key(
    capability: tuple[int, int], itemsize: int, is_quantized: bool
) -> None:
    facts = device.DeviceFacts(100, capability)
    for head_dim in (64, 96, 128, 192, 256, 512):
        for group in (1, 5, 33, 64, 100, 256):
            tiles = paged_attention.prefill_tiles(facts, head_dim, itemsize, group, False, is_quantized)
            assert tiles.block_m >= group
