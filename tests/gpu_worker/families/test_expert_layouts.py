"""Mixtures in every layout of their experts: the same weights, of which ranks read their parts only."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config.groups.parallel import ParallelOptions
from penstock.config.ranks import Place
from penstock.gpu_worker.models.loading.loader import load_model_config
from penstock.gpu_worker.models.loading.stored import BytesRead, StoredWeights
from penstock.gpu_worker.models.loading.weights import WeightReader
from penstock.models.check import check_checkpoint, model_tensors
from penstock.models.description.decoder import Decoder, Experts
from penstock.models.description.names import ExpertLayout, Names
from penstock.models.families.registry import expected_matrices, parse_model_config
from penstock.models.files.source import LoadError
from penstock.models.finding.registry import open_checkpoint
from penstock.models.shards.experts import with_experts_spread
from penstock.models.shards.shard import shard_of
from penstock.models.shards.sources import sources_of
from penstock.models.weights.decoder import all_sources
from tests.gpu_worker.checkpoints import edit_config
from tests.gpu_worker.families.case import Case
from tests.gpu_worker.families.checkpoints import config_of, make_model
from tests.gpu_worker.families.table import CASES
from tests.gpu_worker.formats import writers

LAYOUTS: tuple[ExpertLayout, ...] = ("apart", "joined", "turned")
ALONE = Place()


def architecture_of(case: Case) -> str:
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type]


def decoder_of(case: Case) -> Decoder:
    config = parse_model_config(config_of(case).to_dict() | {"architectures": [architecture_of(case)]})
    assert isinstance(config, Decoder)
    return config


def has_experts(decoder: Decoder) -> bool:
    return any(isinstance(layer.mlp, Experts) or layer.beside_mlp is not None for layer in decoder.layers)


def mixtures() -> dict[str, Case]:
    """The first case with experts of each architecture."""
    found: dict[str, Case] = {}
    for case in CASES.values():
        if architecture_of(case) not in found and has_experts(decoder_of(case)):
            found[architecture_of(case)] = case
    return found


MIXTURES = mixtures()


def relaid(stored: dict[str, Tensor], names: Names, layout: ExpertLayout) -> dict[str, Tensor]:
    """Tensors as transformers computes with them, with experts in this layout."""
    *_, gate, up = ("", *(name.rpartition(".")[2] for name in names.expert_gate_up))
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        start, _, part = name.rpartition("experts.")
        if part.partition("_proj")[0] not in ("gate_up", "up", "down") or part.endswith(".weight"):
            found[name] = tensor
            continue
        matrices = tensor.mT if names.experts == "turned" and tensor.ndim == 3 else tensor
        if layout != "apart":
            found[name] = (matrices.mT if layout == "turned" and tensor.ndim == 3 else matrices).contiguous()
            continue
        pieces = {names.expert_down.rpartition(".")[2] if part.startswith("down") else up: matrices}
        if part.startswith("gate_up"):
            halves = (matrices[:, ::2], matrices[:, 1::2]) if names.experts_alternate else matrices.chunk(2, 1)
            pieces = dict(zip((gate, up), halves, strict=True))
        kind = "bias" if part.endswith("_bias") else "weight"
        found |= {
            f"{start}experts.{i}.{piece}.{kind}": each.contiguous()
            for piece, its in pieces.items()
            for i, each in enumerate(its)
        }
    return found


def weights_of(folder: Path, place: Place = ALONE, *, spread: bool = False) -> tuple[list[Tensor], int]:
    """All weights, or a rank's parts of them, and the bytes that were read for these."""
    whole = load_model_config(folder)
    options = ParallelOptions(tensor_parallel_size=place.num_tensor, enable_expert_parallel=spread)
    config = shard_of(with_experts_spread(whole, options), place)
    assert isinstance(config, Decoder)
    bytes_read = BytesRead()
    tensors = model_tensors(open_checkpoint(folder), whole)
    stored = StoredWeights(tensors, expected_matrices(whole), lambda: None, bytes_read)
    reader = WeightReader(stored.read, False, torch.float32, torch.device("cpu"), read_quantized=stored.read_quantized)
    return [reader.tensor(source) for source in all_sources(sources_of(config))], bytes_read.total


def assert_same(one: tuple[list[Tensor], int], other: tuple[list[Tensor], int]) -> None:
    assert one[1] == other[1]
    assert all(torch.equal(*pair) for pair in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("architecture", MIXTURES)
def test_weights_are_the_same_in_all_layouts(tmp_path: Path, architecture: str) -> None:
    """As transformers writes them, and with the names that it computes with."""
    case = MIXTURES[architecture]
    decoder, model = decoder_of(case), make_model(case)
    model.save_pretrained(tmp_path / "published")
    model.save_pretrained(tmp_path / "computed", save_original_format=False)
    stored = load_file(tmp_path / "computed" / "model.safetensors")
    has_one_layout = "{}" not in decoder.names.expert_down
    places = [(ALONE, False)]
    if not decoder.state_layers and all(layer.mixer is not None for layer in decoder.layers):
        places += [(Place(1, 2), False), (Place(1, 2), True)]
    usual = [weights_of(tmp_path / "published", place, spread=spread) for place, spread in places]
    assert all(num_bytes < 0.75 * usual[0][1] for _, num_bytes in usual[1:])
    for layout in LAYOUTS:
        if not has_one_layout:
            save_file(relaid(stored, decoder.names, layout), tmp_path / "computed" / "model.safetensors")
            assert layout_of(tmp_path / "computed") == layout
        for (place, spread), expected in zip(places, usual, strict=True):
            assert_same(weights_of(tmp_path / "computed", place, spread=spread), expected)
        if has_one_layout:
            break


def test_fp8_is_the_same_in_both_layouts(tmp_path: Path) -> None:
    """Codes and scales of all experts in a tensor each, as transformers computes with them."""
    writer, case = writers.fp8(32), Case("qwen3_moe", {"moe_intermediate_size": 64})
    make_model(case).save_pretrained(tmp_path)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stored |= writer.write(name, tensor)[0] if writer.quantizes(name) else {name: tensor}
    edit_config(tmp_path, quantization_config=writer.config)
    save_file(stored, tmp_path / "model.safetensors")
    places = [(ALONE, False), (Place(1, 2), False), (Place(1, 2), True)]
    apart = [weights_of(tmp_path, place, spread=spread) for place, spread in places]
    joined = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(4):
        start = f"model.layers.{layer}.mlp.experts"
        for kind, ending in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            gate, up, down = (
                torch.stack([stored[f"{start}.{i}.{part}_proj.{kind}"] for i in range(8)])
                for part in ("gate", "up", "down")
            )
            joined |= {f"{start}.gate_up_proj{ending}": torch.cat((gate, up), 1), f"{start}.down_proj{ending}": down}
    save_file(joined, tmp_path / "model.safetensors")
    for (place, spread), expected in zip(places, apart, strict=True):
        assert_same(weights_of(tmp_path, place, spread=spread), expected)


@pytest.mark.parametrize(
    ("layout", "gone"),
    [
        ("apart", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("apart", "model.layers.0.mlp.experts.0.down_proj.weight"),
        ("joined", "model.layers.0.mlp.experts.gate_up_proj"),
        ("turned", "model.layers.2.mlp.experts.down_proj"),
    ],
)
def test_what_is_missing_of_a_layout_is_named(tmp_path: Path, layout: ExpertLayout, gone: str) -> None:
    model = make_model(CASES["qwen3_moe"])
    model.save_pretrained(tmp_path, save_original_format=False)
    stored = relaid(load_file(tmp_path / "model.safetensors"), Names(), layout)
    del stored[gone]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=f"lacks {gone}, which Qwen3MoeForCausalLM has"):
        check_checkpoint(open_checkpoint(tmp_path), with_tokenizer=False)


def test_the_shapes_of_both_matrices_tell_which_side_comes_first(tmp_path: Path) -> None:
    """The hidden size may be that of an expert, or of its gates and ups."""
    for size in (64, 32):
        folder = tmp_path / str(size)
        make_model(Case("qwen3_moe", {"moe_intermediate_size": size})).save_pretrained(
            folder, save_original_format=False
        )
        stored = load_file(folder / "model.safetensors")
        for layout in LAYOUTS:
            save_file(relaid(stored, Names(), layout), folder / "model.safetensors")
            assert layout_of(folder) == layout


def layout_of(folder: Path) -> ExpertLayout:
    config = load_model_config(folder)
    assert isinstance(config, Decoder)
    return config.names.experts
