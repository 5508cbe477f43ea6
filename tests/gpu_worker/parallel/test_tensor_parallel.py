"""Models over tensor ranks, in processes of their own: the same tokens as a single worker's, and as transformers'."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from penstock.config import ConfigError
from penstock.config.groups.parallel import ParallelOptions
from penstock.config.ranks import Place
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.gpu_worker.steps.rank_check import RankCheck, RanksDisagreeError
from penstock.ipc.messages import SamplingParams
from penstock.lab.planning.costs import Costs
from penstock.lab.planning.rank_parts import rank_parts
from penstock.models.description.decoder import Decoder
from penstock.models.shards.shard import check_shards, shard_of
from penstock.models.shards.sources import own_tensors, sources_of
from penstock.models.weights.decoder import all_sources
from tests.gpu_worker.families.checkpoints import Reference
from tests.gpu_worker.families.run import Scored, check, texts_of
from tests.gpu_worker.families.schedules import schedules
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.formats.reference import QuantizedReference
from tests.gpu_worker.formats.test_models_in_formats import FORMATS, case_of
from tests.gpu_worker.parallel.group import GroupEngine, Groups, groups

IS_LONG = bool(os.environ.get("PENSTOCK_SOAK"))
USUAL = {2: ("qwen3", "glm_moe_dsa-shared"), 4: ("mixtral",)}
"""With four ranks, two have the same KV head."""
REFUSED = {("deepseek_v3-kimi", 2), ("deepseek_v3-kimi", 4), ("glm4-no-biases", 4)}
"""Five heads and six."""
CHECKED = [(size, name) for size, names in USUAL.items() for name in (CASES if IS_LONG else names)]
QUANTIZED = [(2, "gptq-mixtral"), (4, "packed-asymmetric")]
if IS_LONG:
    QUANTIZED = [(size, name) for size in (2, 4) for name in FORMATS]
REFUSED_FORMATS = {
    (2, "gptq-4-order"): "order of their importance",
    (4, "gptq-4-order"): "order of their importance",
    (2, "fp8-deepseek"): "in groups of 32",
    **{(4, name): "too few for a part of each rank" for name in FORMATS if name not in ("int8", "nf4", "w8a8", "fp8")},
}
ROUNDED_BY_TOKEN = ("w8a8", "fp8")
"""Inputs with one scale for a token, of which each rank has its own; groups of inputs are never on two ranks."""
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Groups]:
    with groups() as found:
        yield found


def over(ranks: Groups, size: int) -> dict[str, Any]:
    """The options of an engine over so many ranks."""
    return {
        "kind": GroupEngine,
        "group": ranks.of(size),
        "tensor_parallel_size": size,
        "cpu_kernels": "torch",
        "check_ranks": True,
    }


def stays_whole(folder: Path, size: int) -> bool:
    """Whether the model has layers that are not split: with a state, or without a mixer or an MLP.

    Then it is checked that it is refused.
    """
    config = load_model_config(folder)
    assert isinstance(config, Decoder)
    if not config.state_layers and all(layer.mixer and layer.mlp for layer in config.layers):
        return False
    with pytest.raises(ConfigError, match="cannot be split over several workers"):
        check_shards(config, size)
    return True


@pytest.mark.parametrize(("size", "name"), CHECKED)
def test_greedy(tmp_path: Path, name: str, size: int, ranks: Groups) -> None:
    reference = Reference(tmp_path, CASES[name])
    if (name, size) in REFUSED:
        with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size}: .* attention heads"):
            check_shards(load_model_config(tmp_path), size)
        return
    if stays_whole(tmp_path, size):
        return
    for run in schedules(size + list(CASES).index(name))[: 4 if IS_LONG else 1]:
        check(reference, run, **over(ranks, size))


@pytest.mark.parametrize(("size", "name"), QUANTIZED)
def test_quantized(tmp_path: Path, name: str, size: int, ranks: Groups) -> None:
    write, case = FORMATS[name]
    reference = QuantizedReference(tmp_path, case_of(case, write()), write())
    if stays_whole(reference.folder, size):
        return
    try:
        check_shards(load_model_config(reference.folder), size)
    except ConfigError as error:
        assert REFUSED_FORMATS[size, name] in str(error)  # noqa: PT017
        return
    if name in ROUNDED_BY_TOKEN:
        reference.num_ranks = size
    check(reference, schedules(0)[0], **over(ranks, size))


@pytest.mark.parametrize("quantization", ["", "int4", "int8_weight_only"])
def test_seeded_tokens_are_those_of_a_single_worker(tmp_path: Path, ranks: Groups, quantization: str) -> None:
    """Weights that are quantized at load are made by parts."""
    Reference(tmp_path, CASES["llama"])
    texts = texts_of(CASES["llama"])
    options: dict[str, Any] = {"quantization": quantization} if quantization else {}
    single = Scored(tmp_path, cpu_kernels="torch", **options).run(texts, SEEDED, n=2)
    spread = {**over(ranks, 2), **options}
    assert spread.pop("kind") is GroupEngine
    assert GroupEngine(tmp_path, **spread).run(texts, SEEDED, n=2) == single


@pytest.mark.parametrize(("size", "name"), [(2, "qwen3"), (4, "mixtral"), (2, "deepseek_v3")])
def test_each_rank_reads_and_keeps_its_part(tmp_path: Path, name: str, size: int, ranks: Groups) -> None:
    """Bytes that are read, weights and KV are what the descriptions say; of matrices that are split, a rank's part."""
    Reference(tmp_path, CASES[name])
    options = over(ranks, size)
    del options["kind"]
    GroupEngine(tmp_path, **options, num_pages=64)
    whole = load_model_config(tmp_path)
    assert isinstance(whole, Decoder)
    stored = load_file(tmp_path / "model.safetensors")
    all_of_them = sum(its.nbytes for its in stored.values())
    for number, report in enumerate(options["group"].reports):
        its = shard_of(whole, Place(number, size))
        assert isinstance(its, Decoder)
        assert set(own_tensors(its)) <= set(stored)
        parts = [(source, i) for source in all_sources(sources_of(its)) for i in range(len(source.names))]
        expected = 4 * sum(torch.Size(source.part_shape(i)).numel() for source, i in parts)
        assert report.bytes_read == expected
        assert expected < all_of_them * (1 / size + 0.25)  # norms, routers and latents are on every rank
        assert report.weight_bytes == pytest.approx(expected, rel=0.05)
        kept = sum(shape.num_heads * (shape.key_dim + shape.value_dim) for shape in its.kv)
        assert report.kv_bytes == 64 * 16 * 4 * kept
        assert report.hello.page_bytes == 16 * 4 * kept
    (planned,) = rank_parts(Costs(whole, "fp32", "fp32"), ParallelOptions(tensor_parallel_size=size))
    assert planned.weight_bytes == max(report.bytes_read for report in options["group"].reports)
    assert planned.costs.kv_bytes(16) == options["group"].reports[0].hello.page_bytes


class Fixed:
    """Ranks of which the others have drawn these tokens."""

    place = Place(0, 3)

    def __init__(self, others: list[list[int]]) -> None:
        self.others = others

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, *map(torch.tensor, self.others)])


def test_ranks_that_draw_different_tokens_are_stopped() -> None:
    same: Any = Fixed([[3, 5], [3, 5]])
    RankCheck(same)(torch.tensor([3, 5]))
    other: Any = Fixed([[3, 5], [3, 6]])
    with pytest.raises(RanksDisagreeError, match=r"\[5, 5, 6\] for row 1 of 2 that sample, and for 1 rows"):
        RankCheck(other)(torch.tensor([3, 5]))


def test_what_cannot_be_split_is_refused_with_what_can(tmp_path: Path) -> None:
    Reference(tmp_path, CASES["llama"])
    whole = load_model_config(tmp_path)
    assert isinstance(whole, Decoder)
    with pytest.raises(ConfigError, match=r"size 3: LlamaForCausalLM has 4 attention heads, .* over 2 or 4$"):
        check_shards(whole, 3)
    wider = replace(whole.attentions[0][1], num_heads=12)
    wide = replace(whole, layers=tuple(replace(its, mixer=wider) for its in whole.layers))
    with pytest.raises(
        ConfigError, match=r"size 3: LlamaForCausalLM has 2 KV heads, of which ranks would have unequal"
    ):
        check_shards(wide, 3)
    with pytest.raises(ConfigError, match="vocabulary of only 3"):
        check_shards(replace(whole, vocab_size=3), 4)
    with pytest.raises(ConfigError, match="has only 4 layers"):
        check_shards(whole, 1, 5)
