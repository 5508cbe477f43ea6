"""Writes a checkpoint folder as a GGUF file. Runs in llama.cpp's environment, so it imports nothing of Penstock's.

    python write_gguf.py CHECKPOINT_FOLDER FILE.gguf

Matrices as bf16, vectors as fp32, as llama.cpp's own converter does. For Llama and Mixtral it turns the rows of q, k
from the halves that Hugging Face rotates to the neighbouring pairs that llama.cpp rotates; it stacks experts, and adds
the 1 to the weights of Gemma's norms.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_ARCHITECTURES = {
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}


def bf16_tensors(path: Path) -> dict[str, NDArray[np.uint16]]:
    """The tensors of a safetensors file as raw 16-bit words.

    Format: https://github.com/huggingface/safetensors#format
    """
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise SystemExit(f"{name} is {entry['dtype']}; only bf16 checkpoints are written")
        begin, end = entry["data_offsets"]
        found[name] = data[8 + length + begin : 8 + length + end].view(np.uint16).reshape(entry["shape"])
    return found


def paired(weight: NDArray[np.uint16], num_heads: int) -> NDArray[np.uint16]:
    """Rows of each head from (half, pair) to (pair, half) order."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def stacked(tensors: dict[str, NDArray[np.uint16]]) -> dict[str, NDArray[np.uint16]]:
    """The same with one tensor for all experts, under the name that has no number."""
    found: dict[str, NDArray[np.uint16]] = {}
    experts: dict[str, list[NDArray[np.uint16]]] = {}
    for name, weight in tensors.items():
        parts = re.split(r"\.experts\.\d+\.", name)
        if len(parts) == 1:
            found[name] = weight
        else:
            experts.setdefault(".experts.".join(parts), []).append(weight)
    return found | {name: np.stack(weights) for name, weights in experts.items()}


def write(folder: Path, target: Path) -> None:
    """Write the whole file."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        raise SystemExit(f"no GGUF form is known here for {config['architectures'][0]}")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if architecture is gguf.MODEL_ARCH.GEMMA3:
        writer.add_sliding_window(config["sliding_window"])
    _add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weight in stacked(bf16_tensors(folder / "model.safetensors")).items():
        if architecture is gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = paired(weight, heads if "q_proj" in name else kv_heads)
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise SystemExit(f"no GGUF name is known for {name}")
        if weight.ndim == 1:
            vector = (weight.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(written, vector + 1 if architecture is gguf.MODEL_ARCH.GEMMA3 else vector)
        else:
            writer.add_tensor(
                written, np.ascontiguousarray(weight).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    if config["bos_token_id"] is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    partial = Path(sys.argv[2] + ".partial")
    write(Path(sys.argv[1]), partial)
    os.replace(partial, sys.argv[2])
