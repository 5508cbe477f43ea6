"""What checkpoints have beside their matrices: old files, names of a larger model, tensors that say something else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.models.loading.loader import load_model, load_model_config
from penstock.ipc.messages import SamplingParams
from penstock.models.check import model_tensors
from penstock.models.files.source import LoadError
from penstock.models.finding.registry import open_checkpoint
from penstock.models.formats.compressed_tensors import Packed
from tests.gpu_worker.checkpoints import edit_config, make_checkpoint
from tests.gpu_worker.engine_in_process import Engine
from tests.gpu_worker.formats import writers
from tests.gpu_worker.formats.writers import Writer

PROMPT = [5, 9, 2, 7, 11]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def quantized(folder: Path, writer: Writer, named: Callable[[str], str] = str) -> dict[str, Tensor]:
    """Make a checkpoint with the names that `named` gives; its tensors."""
    make_checkpoint(folder, "llama")
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        its = writer.write(named(name), tensor)[0] if writer.quantizes(name) else {named(name): tensor}
        stored = its | stored
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config=writer.config)
    return stored


@pytest.mark.parametrize(
    ("name", "writer"), [("quantize_config.json", writers.gptq()), ("quant_config.json", writers.awq())]
)
def test_the_configuration_is_in_a_file_of_its_own(tmp_path: Path, name: str, writer: Writer) -> None:
    quantized(tmp_path / "new", writer)
    old = Path(shutil.copytree(tmp_path / "new", tmp_path / "old"))
    edit_config(old, quantization_config=None)
    said = {key: value for key, value in writer.config.items() if key != "quant_method"}
    if name == "quant_config.json":  # AutoAWQ's first names
        said = {"w_bit": said["bits"], "q_group_size": said["group_size"], "version": "GEMM", "zero_point": True}
    (old / name).write_text(json.dumps(said))
    outputs = [Engine(folder).run([PROMPT], GREEDY) for folder in (tmp_path / "new", old)]
    assert outputs[0] == outputs[1]


def test_rules_are_for_the_names_of_the_whole_model(tmp_path: Path) -> None:
    """Of a model with a text part, rules and stored tensors have other names than the text part's."""

    def named(name: str) -> str:
        return f"language_model.{name}"

    quantized(tmp_path, writers.compressed("pack-quantized", GROUPS), named)
    config = json.loads((tmp_path / "config.json").read_text())
    rule = {"targets": [r"re:language_model\.model\.layers\.\d+\.mlp\..*"], "weights": GROUPS}
    said = config.pop("quantization_config") | {"config_groups": {"group_0": rule, "group_1": {
        "targets": ["language_model.model.layers.0.self_attn.q_proj", r"re:model\.layers\..*"], "weights": GROUPS,
    }}}  # fmt: skip
    whole = {"architectures": ["LlavaForConditionalGeneration"], "text_config": config, "quantization_config": said}
    whole["vision_config"] = {"model_type": "a tower that is not served"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(LoadError, match=r"lacks model\.layers\.0\.self_attn\.k_proj\.weight"):  # no rule is for it
        model_tensors(open_checkpoint(tmp_path), load_model_config(tmp_path))
    said["config_groups"]["group_1"]["targets"].append(r"re:language_model\..*self_attn")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    formats = model_tensors(open_checkpoint(tmp_path), load_model_config(tmp_path)).formats
    assert len(formats) == 2 * 7
    assert all(isinstance(its, Packed) for its in formats.values())
    assert len(Engine(tmp_path).run([PROMPT], GREEDY)[0][0]) == 8


@pytest.mark.parametrize(
    ("writer", "part", "other"),
    [
        (writers.nf4(), "weight.quant_state.bitsandbytes__nf4", torch.tensor(list(b"{}"), dtype=torch.uint8)),
        (
            writers.nf4(),
            "weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b'{"blocksize": 64, "shape": [32, 128], "nested_blocksize": 256}'), dtype=torch.uint8),
        ),
        (writers.nf4(), "weight.absmax", torch.zeros(3, dtype=torch.uint8)),
        (writers.int8(), "weight_format", torch.tensor(2, dtype=torch.uint8)),
        (writers.gptq(has_order=True), "g_idx", torch.zeros(64, dtype=torch.int32)),
        (writers.compressed("pack-quantized", GROUPS), "weight_shape", torch.tensor([64, 60])),
    ],
)
def test_tensors_that_contradict_are_refused_in_a_sentence(
    tmp_path: Path, writer: Writer, part: str, other: Tensor
) -> None:
    stored = quantized(tmp_path, writer)
    name = f"model.layers.1.self_attn.q_proj.{part}"
    assert name in stored
    save_file(stored | {name: other}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"damaged|one GPU|stored as a matrix of shape"):
        load_model(open_checkpoint(tmp_path), load_model_config(tmp_path), torch.float32, CpuDevice(1))
