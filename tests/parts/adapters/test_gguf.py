"""Adapters in llama.cpp's form say what the PEFT folders say that they were made of, on bases of both forms."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.gpu_worker.conftest import Checkpoint, checkpoint, one_thread
from tests.gpu_worker.engine_in_process import Engine
from tests.models.gguf.written import write
from tests.parts.adapters.test_parity import PROMPTS, assert_greedy, gate_of, load, run
from tests.parts.adapters.written import write_adapter

__all__ = ["checkpoint", "one_thread"]
Make = Callable[..., Checkpoint]
Array = NDArray[np.float32]

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_of(module: str) -> str:
    """llama.cpp's of a module."""
    if module in _OTHERS:
        return _OTHERS[module]
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}"


def for_neighbours(rows: Array, name: str, config: transformers.PretrainedConfig) -> Array:
    """Outputs of q and k as llama.cpp's converter orders them for its rotation: pairs beside each other."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-1])
    if heads is None:
        return rows
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_base(path: Path, model: transformers.PreTrainedModel) -> Path:
    """A Llama in fp32."""
    config = model.config

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        for name, tensor in model.state_dict().items():
            its = name_of(name.removesuffix(".weight"))
            writer.add_tensor(f"{its}.weight", for_neighbours(tensor.numpy(), its, config))

    return write(path, fill)


def converted(
    path: Path,
    folder: Path,
    config: transformers.PretrainedConfig,
    *,
    architecture: str = "llama",
    kind: str = "F32",
    change: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    **keys: Any,
) -> Path:
    """What llama.cpp's convert_lora_to_gguf.py makes of a PEFT folder; `kind`: the type of the first matrices."""
    fields = {"type": "adapter", "method": "lora"} | keys
    number = gguf.GGMLQuantizationType[kind]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_type(fields["type"])
        writer.add_string("adapter.type", fields["method"])
        writer.add_float32("adapter.lora.alpha", json.loads((folder / "adapter_config.json").read_text())["lora_alpha"])
        for name, tensor in load_file(folder / "adapter_model.safetensors").items():
            module, _, half = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
            its = name_of(module)
            if half == "A":
                writer.add_tensor(f"{its}.weight.lora_a", gguf.quants.quantize(tensor, number), raw_dtype=number)
            else:
                rows = for_neighbours(tensor, its, config) if architecture == "llama" else tensor
                writer.add_tensor(f"{its}.weight.lora_b", rows)
        change(writer)

    return write(path, fill, architecture)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_on_bases_of_both_forms(checkpoint: Make, tmp_path: Path, form: str, kernels: str) -> None:
    """With an odd rank; and one whose first matrices are quantized, which differ by their rounding."""
    folder, model = checkpoint("llama")
    base = folder if form == "safetensors" else write_base(tmp_path / "base.gguf", model)
    merged = write_adapter(tmp_path / "one", model, 7)
    engine = Engine(base, cpu_kernels=kernels)
    keys = [load(engine, "folder", tmp_path / "one")]
    for kind in ("F32", "F16", "Q8_0"):
        path = converted(tmp_path / f"{kind}.gguf", tmp_path / "one", model.config, kind=kind)
        keys.append(load(engine, kind, path))
    outputs = run(engine, [(prompt, key) for key in keys for prompt in PROMPTS])
    for prompt, output in zip(PROMPTS * 2, outputs, strict=False):  # the folder's and F32's
        assert_greedy(merged, prompt, output)
    assert [known.state for known in gate_of(engine).known.values()] == ["ready"] * 4
    of_model = run(engine, [(prompt, "") for prompt in PROMPTS])
    some = slice(2 * len(PROMPTS), None)
    assert all(output not in of_model for output in outputs[some])


def test_outputs_that_are_not_turned(checkpoint: Make, tmp_path: Path) -> None:
    """Qwen's q and k rotate halves in llama.cpp, too."""
    folder, model = checkpoint("qwen3")
    merged = write_adapter(tmp_path / "one", model, 4, ("q_proj", "k_proj", "down_proj"))
    path = converted(tmp_path / "one.gguf", tmp_path / "one", model.config, architecture="qwen3")
    engine = Engine(folder, cpu_kernels="native")
    key = load(engine, "one", path)
    for prompt, output in zip(PROMPTS, run(engine, [(prompt, key) for prompt in PROMPTS]), strict=True):
        assert_greedy(merged, prompt, output)


def _add(name: str, *shape: int) -> Callable[[gguf.GGUFWriter], object]:
    return lambda writer: writer.add_tensor(name, np.zeros(shape, np.float32))


HARM: dict[str, tuple[dict[str, Any], str]] = {
    "a model": ({"type": "model"}, "its general.type is 'model'"),
    "another method": ({"method": "control_vector"}, "its adapter.type is 'control_vector'"),
    "an unknown architecture": ({"architecture": "rwkv7"}, "architecture 'rwkv7' are not supported"),
    "tokens that switch it on": (
        {"change": lambda writer: writer.add_array("adapter.alora.invocation_tokens", [3, 4])}, "invocation_tokens",
    ),
    "a norm": ({"change": _add("blk.0.attn_norm.weight", 64)}, "'blk.0.attn_norm.weight' is not supported"),
    "half a pair": ({"change": _add("blk.0.attn_qkv.weight.lora_a", 4, 64)}, "'blk.0.attn_qkv.weight' is missing"),
    "embeddings": (
        {"change": lambda writer: [_add(f"token_embd.weight.lora_{a}", 4, 4)(writer) for a in "ab"]},
        "it changes 'model.embed_tokens'",
    ),
    "no numbers": (
        {"change": lambda writer: [_add(f"blk.0.ffn_x.weight.lora_{a}", 0, 4)(writer) for a in "ab"]},
        "shapes [0, 4] and [0, 4]",
    ),
    "experts": (
        {"change": lambda writer: [_add(f"blk.0.ffn_up_exps.weight.lora_{a}", 2, 4, 4)(writer) for a in "ab"]},
        "ffn_up_exps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_refused(checkpoint: Make, tmp_path: Path, harm: str) -> None:
    folder, model = checkpoint("llama")
    write_adapter(tmp_path / "one", model)
    given, why = HARM[harm]
    path = converted(tmp_path / "one.gguf", tmp_path / "one", model.config, **given)
    engine = Engine(folder, cpu_kernels="native")
    key = load(engine, "one", path)
    engine.make_ready()
    assert why in gate_of(engine).known[key].error


def test_a_file_that_is_cut_off(checkpoint: Make, tmp_path: Path) -> None:
    folder, model = checkpoint("llama")
    write_adapter(tmp_path / "one", model)
    path = converted(tmp_path / "one.gguf", tmp_path / "one", model.config)
    path.write_bytes(path.read_bytes()[:-5000])
    engine = Engine(folder, cpu_kernels="native")
    key = load(engine, "one", path)
    engine.make_ready()
    assert "cut off" in gate_of(engine).known[key].error
