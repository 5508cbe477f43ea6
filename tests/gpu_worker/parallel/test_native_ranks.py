"""Native programs of tensor ranks: every block like that of one worker, and the same bits on all ranks in any batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.config.ranks import Place
from penstock.gpu_worker.models.loading.decoder_build import build
from penstock.gpu_worker.models.loading.stored import part_of
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.parallel.alone import ALONE, Alone
from penstock.gpu_worker.parallel.one_host import OneHost
from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.ipc.messages import SamplingParams
from penstock.kernels.native.library import Library
from penstock.kernels.native.ranks.group import SharedRanks
from penstock.models.description.decoder import Decoder, LatentAttention
from penstock.models.shards.shard import shard_of
from penstock.models.weights.decoder import decoder_tensors
from penstock.models.weights.sources import Ranges
from tests.gpu_worker.checkpoints import make_checkpoint, prompts
from tests.gpu_worker.engine_in_process import Engine
from tests.gpu_worker.models.test_native_decoder import _CASES, decoder
from tests.gpu_worker.parallel.group import GroupEngine, groups
from tests.kernels.native.native_library import load_library
from tests.kernels.native.rank_processes import run_ranks
from tests.kernels.native.test_native import World, alone, by_token, in_chunks, whole

OVER_RANKS = "norms after each part only"
"""One of its norms spans the heads of all ranks, which torch's kernels compute."""


BY_TOKEN = ("experts", "latents", "scales")
IN_BF16 = [*BY_TOKEN, "parallel", "tied, odd sizes", "experts with a gated shared one, a norm after them"]


class _Near(Alone):
    """What is not within a stage is not asked for here."""

    def __init__(self, place: Place) -> None:
        self.place = place


def config_of(name: str) -> Decoder:
    """As for one worker, with a number of heads that can be halved."""
    plain = decoder(name)
    layers = [
        replace(layer, mixer=replace(layer.mixer, num_heads=6)) if isinstance(layer.mixer, LatentAttention) else layer
        for layer in plain.layers
    ]
    return replace(plain, layers=tuple(layers))


def model_of(name: str, dtype: torch.dtype, library: Library, ranks: Ranks) -> Model:
    """A rank's part of the same random weights, or all of them."""
    config = config_of(name)
    shapes = decoder_tensors(config)

    def read(name: str, ranges: Sequence[Ranges | None]) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        drawn = torch.empty(shapes[name]).normal_(0, 1, generator=generator)
        found = drawn if "embed" in name else 1 + 0.1 * drawn if "norm" in name else 0.1 * drawn
        return part_of(found.to(dtype), ranges)

    reader = WeightReader(read, dtype == torch.bfloat16, dtype, torch.device("cpu"), library, ranks=ranks)
    part = shard_of(config, ranks.place)
    assert isinstance(part, Decoder)
    return build(part, reader)


@torch.inference_mode()
def compute(
    shared: SharedRanks, library: Library, names: list[str], dtype: torch.dtype
) -> dict[str, tuple[str, list[Tensor], list[str]]]:
    """Of each case: the kernels, logits, and the ways to batch that give other bits."""
    ranks = OneHost(_Near(Place(shared.struct.rank, shared.struct.num_ranks)), shared)
    found = {}
    for name in names:
        model = model_of(name, dtype, library, ranks)
        world = World(model.config, 16, dtype)  # type: ignore[arg-type]
        expected = world.run(model, whole(world))
        others = (alone, by_token) if name in BY_TOKEN else (in_chunks,)
        unlike = [
            batches.__name__
            for batches in others
            if not all(map(torch.equal, world.run(model, batches(world)), expected))
        ]
        found[name] = model.kernels, expected, unlike
    return found


@pytest.mark.parametrize(
    ("names", "dtype", "num_threads"), [(_CASES, torch.float32, 1), (IN_BF16, torch.bfloat16, 2)], ids=["fp32", "bf16"]
)
@torch.inference_mode()
def test_like_one_worker(names: list[str], dtype: torch.dtype, num_threads: int) -> None:
    first, second = run_ranks(2, compute, names, dtype, num_threads=num_threads, seconds=240)
    library = load_library(1)
    for name in names:
        kernels, logits, unlike = first[name]
        assert all(map(torch.equal, logits, second[name][1])), name
        if name == OVER_RANKS:
            assert not kernels.startswith("native")
            continue
        assert kernels == "native", name
        assert unlike == second[name][2] == [], name
        world = World(config_of(name), 16, dtype)
        expected = world.run(model_of(name, dtype, library, ALONE), whole(world))
        tolerance = 1e-3 if dtype == torch.float32 else 0.1
        for one, other in zip(logits, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_ranks", "quantization"), [(2, "int4"), (2, "int8_weight_only"), (4, None)])
def test_an_engine_gives_the_tokens_of_one_worker(tmp_path: Path, num_ranks: int, quantization: str | None) -> None:
    """Greedy and seeded, in exact arithmetic."""
    load_library(1)  # compile once, or skip
    make_checkpoint(tmp_path, "llama-mha-tied", num_hidden_layers=2)
    options: dict[str, Any] = {"cpu_kernels": "native"} | (
        {} if quantization is None else {"quantization": quantization}
    )
    texts = prompts((5, 40, 17), seed=3)
    sampling = [SamplingParams(max_tokens=12, temperature=t, seed=7) for t in (0.0, 0.9, 1.2)]
    expected = Engine(tmp_path, **options).run(texts, sampling)
    with groups() as found:
        engine = GroupEngine(tmp_path, group=found.of(num_ranks), tensor_parallel_size=num_ranks, **options)
        assert engine.run(texts, sampling) == expected
        assert engine.hello.is_batch_invariant
        assert engine.hello.kernels == "native"
