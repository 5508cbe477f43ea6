"""Checkpoints: what is loaded, and what is refused in one clear sentence."""

import gc
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import ConfigError
from penstock.config.ranks import Place
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.blocks.mlp import MLPBlock
from penstock.gpu_worker.models.decoder import DecoderModel
from penstock.gpu_worker.models.linear import Embedding, Linear, PlainEmbedding, PlainLinear
from penstock.gpu_worker.models.loading import random_weights
from penstock.gpu_worker.models.loading.loader import dummy_model, load_model, load_model_config
from penstock.gpu_worker.models.loading.stored import part_of
from penstock.kernels.native.build import BuildError, build
from penstock.kernels.native.library import Library
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import expected_tensors
from penstock.models.files.source import LoadError
from penstock.models.finding.registry import open_checkpoint
from penstock.models.shards.shard import shard_of
from penstock.models.weights.sources import Ranges
from tests.gpu_worker.checkpoints import attention_of, edit_config
from tests.gpu_worker.conftest import Checkpoint

CPU = CpuDevice(1)
Make = Callable[..., Checkpoint]


@pytest.fixture
def folder(checkpoint: Make, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(checkpoint("llama")[0], tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    model = load_model(open_checkpoint(folder), load_model_config(folder), dtype, CPU)
    assert isinstance(model, DecoderModel)
    return model


def plain(linear: Linear | None) -> PlainLinear:
    assert isinstance(linear, PlainLinear)
    return linear


def rows(embedding: Embedding | None) -> torch.Tensor:
    assert isinstance(embedding, PlainEmbedding)
    return embedding.weight


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def mlp(model: DecoderModel, layer: int) -> MLPBlock:
    found = model.layers[layer].mlp
    assert isinstance(found, MLPBlock)
    return found


def final_norm(model: DecoderModel) -> Tensor:
    assert model.final_norm is not None
    assert model.final_norm.weight is not None
    return model.final_norm.weight


def test_fused_weights(checkpoint: Make) -> None:
    folder, model = checkpoint("llama-mqa-biases")
    loaded = load(folder)
    state = model.state_dict()
    layer = loaded.layers[1]
    attention = "model.layers.1.self_attn"
    for kind, tensor in (
        ("weight", plain(attention_of(layer).qkv).weight),
        ("bias", plain(attention_of(layer).qkv).bias),
    ):
        expected = torch.cat([state[f"{attention}.{name}_proj.{kind}"] for name in "qkv"])
        assert tensor is not None
        assert torch.equal(tensor, expected)
    bias = plain(attention_of(layer).o).bias
    assert bias is not None
    assert torch.equal(bias, state[f"{attention}.o_proj.bias"])
    gate_up = torch.cat([state[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(plain(mlp(loaded, 1).gate_up).weight, gate_up)
    assert torch.equal(final_norm(loaded), state["model.norm.weight"])
    assert torch.equal(plain(loaded.head).weight, state["lm_head.weight"])


def test_tied_embeddings_are_one_tensor(checkpoint: Make) -> None:
    loaded = load(checkpoint("llama-mha-tied")[0])
    assert plain(loaded.head).weight is rows(loaded.embedding)


def test_a_tied_output_matrix_in_the_file_is_ignored(checkpoint: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama-mha-tied")[0], tmp_path / "model"))
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(199, 64)}))
    loaded = load(folder)
    assert loaded.logits(torch.ones(1, 64)).abs().max() > 0


def test_conversion(folder: Path) -> None:
    weights = load(folder, torch.bfloat16)
    assert plain(attention_of(weights.layers[0]).qkv).weight.dtype == torch.bfloat16
    assert torch.equal(rows(weights.embedding), rows(load(folder).embedding).bfloat16())


def test_bf16_weights_are_in_memory_once(folder: Path) -> None:
    try:
        library = Library(build(), 1)
    except BuildError as error:
        pytest.skip(str(error))
    config = load_model_config(folder)
    before = large_tensors()
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, config, torch.bfloat16, CpuDevice(1, library))
    made = sum(storage.nbytes() for at, storage in large_tensors().items() if at not in before)
    num_parameters = sum(math.prod(shape) for shape in (expected_tensors(config) or {}).values())
    assert round(made / (2 * num_parameters)) == 1  # but for norms and padding
    assert (model.kernels, model.is_batch_invariant) == ("native", True)


def large_tensors() -> dict[int, torch.UntypedStorage]:
    """The storages of more than 2 KB that there are, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return {at: storage for at, storage in storages.items() if storage.nbytes() > 2048}


def test_shards(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(rows(load(tmp_path).embedding), rows(load(folder).embedding))
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(LoadError, match=gone.name):
        load(tmp_path)


@pytest.mark.parametrize("num_blanks", [1, 2])
def test_data_that_begins_at_an_odd_address(folder: Path, num_blanks: int) -> None:
    expected = plain(mlp(load(folder), 1).down).weight
    path = folder / "model.safetensors"
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = content[8:begin] + b" " * num_blanks
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[begin:])
    assert torch.equal(plain(mlp(load(folder), 1).down).weight, expected)


def test_dummy_weights_are_the_same_each_time(folder: Path) -> None:
    config = load_model_config(folder)
    models = [dummy_model(config, torch.float32, CPU) for _ in range(2)]
    first, second = (model for model in models if isinstance(model, DecoderModel))
    assert torch.equal(plain(mlp(first, 1).down).weight, plain(mlp(second, 1).down).weight)
    assert plain(attention_of(first.layers[0]).qkv).weight.shape == ((4 + 2 * 2) * 16, 64)
    assert plain(attention_of(first.layers[0]).qkv).weight.std() > 0
    assert torch.equal(final_norm(first), torch.ones(64))


@pytest.mark.parametrize(
    ("shape", "ranges", "num_tiles"),
    [
        ((21,), [((3, 5), (9, 20))], 3),
        ((9, 21), [None, ((8, 16),)], 3),
        ((9, 21), [((4, 8),), None], 3),
        ((9, 21), [((1, 2), (7, 9)), ((5, 9), (20, 21))], 9),
        ((3, 9, 21), [((0, 1), (2, 3)), ((0, 4),), ((0, 8),)], 2),
        ((3, 9, 21), [], 27),
    ],
)
def test_a_part_of_random_weights_is_as_in_the_whole(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], ranges: list[Ranges | None], num_tiles: int
) -> None:
    """And no more of it is drawn than the tiles that the part is in."""
    monkeypatch.setattr(random_weights, "_TILE", (4, 8))
    weights = random_weights.RandomWeights({"one": shape, "a.norm.weight": shape}, torch.float32, CPU.torch_device)
    whole = weights.read("one")
    assert len(whole.unique()) == whole.numel(), "no two tiles are alike"
    assert torch.equal(weights.read("a.norm.weight"), torch.ones(shape))
    drawn = 0

    def seed(of_tile: int, its: torch.Generator = weights._generator) -> torch.Generator:
        nonlocal drawn
        drawn += 1
        return its.manual_seed(of_tile)

    monkeypatch.setattr(weights, "_generator", SimpleNamespace(manual_seed=seed))
    assert torch.equal(weights.read("one", ranges), part_of(whole, ranges))
    assert drawn == num_tiles


@pytest.mark.parametrize("rank", range(2))
def test_ranks_make_parts_of_the_same_dummy_weights(folder: Path, rank: int) -> None:
    config, ranks = load_model_config(folder), SimpleNamespace(place=Place(rank, 2), all_reduce=None)
    whole = dummy_model(config, torch.float32, CPU)
    its = dummy_model(shard_of(config, ranks.place), torch.float32, CPU, ranks)
    assert isinstance(whole, DecoderModel)
    assert isinstance(its, DecoderModel)
    of_whole, of_rank = (plain(mlp(model, 1).down).weight for model in (whole, its))
    assert torch.equal(of_rank, of_whole.chunk(2, dim=1)[rank])


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="pickled"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=r"no \.safetensors"):
        load(folder)


def weights_file(header: object, num_bytes: int = 8) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


def entry(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DAMAGED = {
    "noise": b"\xff" * 100,
    "empty": b"",
    "header of 2**63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "header of 90 MB that is not there": struct.pack("<Q", 90 << 20) + b"{}",
    "truncated": weights_file({"a": entry(0, 8)}, num_bytes=4),
    "overlapping": weights_file({"a": entry(0, 8), "b": entry(4, 12)}, num_bytes=12),
    "beyond its end": weights_file({"a": entry(0, 1 << 62, (1 << 60,))}),
    "sizes that overflow": weights_file({"a": entry(0, 8, (1 << 40, 1 << 40))}),
    "size and shape disagree": weights_file({"a": entry(0, 8, (3,))}),
    "unknown type": weights_file({"a": entry(0, 8, dtype="OBJECT")}),
    "no object": weights_file(["a"]),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    before = psutil.Process().memory_info().rss
    with pytest.raises(LoadError, match="not a readable safetensors file") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_a_damaged_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(LoadError, match="not an index of weight files"):
        load(folder)


def test_missing_tensors(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.__delitem__("model.norm.weight"))
    with pytest.raises(LoadError, match=r"lacks model\.norm\.weight"):
        load(folder)


def test_unexpected_tensors(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(LoadError, match=r"config.json: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_mis_shaped_tensors(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(LoadError, match=r"model\.norm\.weight has shape \[63\]"):
        load(folder)


def test_integer_tensors(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(LoadError, match="of type I8"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "positive factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rotary_settings_that_are_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model_config(folder)


def test_the_older_spelling_of_rotary_settings(checkpoint: Make, tmp_path: Path) -> None:
    for name in ("llama", "llama-linear", "llama-dynamic", "llama-llama3", "llama-yarn"):
        folder = Path(shutil.copytree(checkpoint(name)[0], tmp_path / name))
        new = load_model_config(folder)
        settings = json.loads((folder / "config.json").read_text())["rope_parameters"]
        theta = settings.pop("rope_theta")
        kind = settings.pop("rope_type")
        scaling = None if kind == "default" else settings | {"type": kind}
        edit_config(folder, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
        assert load_model_config(folder) == new
        assert isinstance(new, Decoder)
        rope = new.attentions[0][1].rope
        assert rope is not None
        assert rope.kind == kind


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("Mistral", {"sliding_window": None}, (None, None, None)),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8)),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (None, None, None)),
        ("Llama", {}, (None, None, None)),
    ],
)
def test_windows(tmp_path: Path, family: str, changes: dict[str, object], windows: tuple[int | None, ...]) -> None:
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        architectures=[f"{family}ForCausalLM"],
        **changes,
    )
    config.save_pretrained(tmp_path)
    assert load_model_config(tmp_path).windows == windows
    edit_config(tmp_path, layer_types=None)  # what older checkpoints lack
    assert load_model_config(tmp_path).windows == windows
