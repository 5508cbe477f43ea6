"""Checkpoints that cannot be served: each a way to spoil a good one, and what must be said of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.models.families.registry import expected_tensors, parse_model_config
from tests.clockwork.family import CLOCKWORK

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": 2,
}
Shapes = dict[str, tuple[int, ...]]
SHAPES: Shapes = expected_tensors(parse_model_config(BASE)) or {}
Q = "model.layers.0.self_attn.q_proj.weight"


def write_weights(path: Path, shapes: Shapes, dtype: str = "BF16") -> None:
    """A weight file of zeros; `dtype` is that of the matrices."""
    header, size = {}, 0
    for name, shape in shapes.items():
        num_bytes = (1 if dtype in ("I8", "U8") else 2) * int.__mul__(*shape) if len(shape) == 2 else 2 * shape[0]
        kind = dtype if len(shape) == 2 else "BF16"
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [size, size + num_bytes]}
        size += num_bytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def write_tokenizer(folder: Path, vocab_size: int = 32) -> None:
    vocabulary = {f"t{index}": index for index in range(vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))


def make_good(folder: Path) -> Path:
    """Write a checkpoint that can be served."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(BASE))
    write_tokenizer(folder)
    write_weights(folder / "model.safetensors", SHAPES)
    return folder


def check_sentence(text: str) -> None:
    """It is one sentence: short, on one line, without a full stop, and not made for programmers."""
    assert 10 < len(text) < 600
    assert "\n" not in text
    assert text.endswith("...") or not text.endswith(".")
    assert not any(word in text for word in ("Traceback", "Errno", "object at 0x"))


def change(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(BASE | fields))


def _config(text: str | bytes) -> Callable[[Path], object]:
    return lambda f: (f / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)


def _changed(**fields: Any) -> Callable[[Path], object]:
    return lambda f: change(f, **fields)


def _tensors(
    new: Callable[[str], str] = str, dtype: str = "BF16", shapes: Shapes | None = None
) -> Callable[[Path], object]:
    """Weights with other names, another dtype, or other shapes (tensors whose shape is empty are left out)."""
    changed = {new(name): shape for name, shape in SHAPES.items()} | (shapes or {})
    return lambda f: write_weights(f / "model.safetensors", {n: shape for n, shape in changed.items() if shape}, dtype)


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda f: (f / "model.safetensors").write_bytes(content)


def _only(name: str, content: str | bytes = b"") -> Callable[[Path], object]:
    """This file in the place of weights and config.json."""

    def spoil(folder: Path) -> None:
        for old in ("config.json", "model.safetensors"):
            (folder / old).unlink()
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def in_shards(folder: Path, index: dict[str, str] | None = None, *, without: int | None = None) -> None:
    """Weights in two files with an index, or with this index; without one of the files."""
    names = list(SHAPES)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        if number != without:
            write_weights(folder / file, {name: SHAPES[name] for name in half})
        weight_map |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | (index or {})}))


def _cut_shard(folder: Path) -> None:
    in_shards(folder)
    path = folder / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def _twice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write_weights(folder / "b.safetensors", {Q: (16, 16)})


def _cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def half_downloaded(folder: Path) -> None:
    """As `hf download` leaves it when it is stopped: a link whose blob has another name until it is whole."""
    (folder / "model.safetensors").unlink()
    blobs = folder.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    (blobs / "abc.incomplete").write_bytes(b"half")
    (folder / "model.safetensors").symlink_to(blobs / "abc")


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 12345\n"
_SAFE, _BF16 = "safetensors", "bfloat16"

Case = tuple[Callable[[Path], object], tuple[str, ...]]
BROKEN: dict[str, Case] = {
    # config.json
    "nothing": (_empty, ("empty", "config.json", "hf download")),
    "no config.json": (_only("README.md"), ("config.json", "not a checkpoint folder")),
    "empty config.json": (_config(""), ("config.json", "empty")),
    "no JSON": (_config("{"), ("config.json", "not a JSON object")),
    "a list": (_config("[1]"), ("config.json", "not a JSON object")),
    "no text": (_config(b"\xff\xfe\x00"), ("config.json", "not a JSON object")),
    "objects without end": (_config('{"a":' * 100_000), ("config.json", "not a JSON object")),
    "a pointer as config.json": (_config(POINTER), ("config.json", "Git LFS pointer", "git lfs pull")),
    # architectures
    "no architecture": (_changed(architectures=None), ("config.json", "architectures", "LlamaForCausalLM")),
    "architectures of numbers": (_changed(architectures=[1]), ("config.json", "architectures", "[1]")),
    "a misspelt architecture": (
        _changed(architectures=["LammaForCausalLM"]),
        ("LammaForCausalLM is not supported", "the nearest that is: LlamaForCausalLM", "same fields"),
    ),
    "a new architecture": (
        _changed(architectures=["Lama5ForCausalLM"], num_loops=3, loop_gate=True, rms_norm_eps=1e-5),
        ("Lama5ForCausalLM is not supported", "the nearest that is: LlamaForCausalLM", "loop_gate", "num_loops"),
    ),
    "new kinds of layers": (
        _changed(architectures=["Qwen5ForCausalLM"], layer_types=["scan", "full_attention"]),
        ("Qwen5ForCausalLM is not supported", "Qwen", "layers of kind scan"),
    ),
    "another architecture": (
        _changed(architectures=["BloomForCausalLM"], model_type="bloom"),
        ("BloomForCausalLM", "does not let others compute its attention", "not supported", "the nearest that is: "),
    ),
    "layers with a state": (
        _changed(architectures=["MiniMaxForCausalLM"], layer_types=["linear_attention", "full_attention"]),
        ("MiniMaxForCausalLM has layers of kind linear_attention", "only layers that keep keys and values are"),
    ),
    "an encoder": (_changed(architectures=["ElectraModel"]), ("ElectraModel", "vectors or labels", "text")),
    "a classifier": (_changed(architectures=["GemmaForSequenceClassification"]), ("labels", "GemmaForCausalLM")),
    "an encoder and a decoder": (
        _changed(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True),
        ("T5ForConditionalGeneration", "an encoder and a decoder"),
    ),
    "of pictures": (
        _changed(architectures=["Qwen2VLForConditionalGeneration"], vision_config={"depth": 1}),
        ("Qwen2VLForConditionalGeneration", "it takes images in a way that is not supported"),
    ),
    "a model for tests": (
        _changed(architectures=list(CLOCKWORK.architectures)), (*CLOCKWORK.architectures, "not supported")
    ),
    "remote code": (
        _changed(architectures=["OwnForCausalLM"], auto_map={"AutoModel": "own.Model"}),
        ("config.json", "auto_map", "never run", "OwnForCausalLM"),
    ),
    # quantized weights
    **{
        f"quantized: {method}": (
            _changed(quantization_config={"quant_method": method}),
            ("quantized", method, "supported"),
        )
        for method in ("hqq", "spqr", "aqlm")
    },
    "quantized by a word": (_changed(quantization_config="gptq"), ("quantization_config", "object", "gptq")),
    "quantized in the old way": (
        lambda f: (f / "quantize_config.json").write_text("{}"), ("gptq", "quantize_config.json")
    ),
    "quantized by its tensors": (
        _tensors(lambda name: name.replace("q_proj.weight", "q_proj.qweight")),
        ("quantized", "q_proj.qweight", "quantization_config"),
    ),
    "integers": (_tensors(dtype="I8"), ("model.embed_tokens.weight", "I8", "floats")),
    # other fields
    "too many layers": (_changed(num_hidden_layers=10**9), ("config.json", "num_hidden_layers", "1000000000", "4096")),
    "no layers": (_changed(num_hidden_layers=0), ("config.json", "num_hidden_layers", "positive", "0")),
    "a negative size": (_changed(hidden_size=-16), ("config.json", "hidden_size", "-16")),
    "a size too large": (
        _changed(hidden_size=1 << 62), ("config.json", "hidden_size", "up to 1073741824", str(1 << 62))
    ),
    "an odd head": (_changed(head_dim=17), ("config.json", "head_dim", "17", "even")),
    "a size in words": (_changed(vocab_size="32"), ("config.json", "vocab_size", "integer", "'32'")),
    "a size that is no number": (
        _config(json.dumps(BASE | {"rms_norm_eps": float("nan")})), ("config.json", "rms_norm_eps", "NaN")
    ),
    "a size without end": (
        _config(json.dumps(BASE | {"rope_scaling": {"rope_type": "linear", "factor": float("inf")}})),
        ("config.json", "factor", "Infinity"),
    ),
    "a number too large": (
        _config(json.dumps(BASE)[:-1] + ', "rms_norm_eps": 1e999}'), ("config.json", "rms_norm_eps", "inf")
    ),
    "heads that do not divide": (
        _changed(num_attention_heads=3, num_key_value_heads=2, hidden_size=48),
        ("config.json", "num_attention_heads", "3", "num_key_value_heads", "2"),
    ),
    "kinds of too few layers": (
        _changed(
            architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8,
            layer_types=["full_attention"],
        ),
        ("config.json", "layer_types", "2"),
    ),
    "a kind of layer that is none": (
        _changed(
            architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8,
            layer_types=["full_attention", "mamba"],
        ),
        ("config.json", "layer_types", "mamba"),
    ),
    "another rotary kind": (
        _changed(rope_scaling={"rope_type": "spiral", "factor": 2.0}), ("config.json", "rope", "'spiral'", "llama3")
    ),
    "a factor of nothing": (
        _changed(rope_scaling={"rope_type": "linear", "factor": 0}), ("config.json", "factor", "0")
    ),
    "another activation": (_changed(hidden_act="snake"), ("config.json", "hidden_act", "'snake'", "silu")),
    "another dtype": (_changed(dtype="int4"), ("config.json", "dtype", "'int4'", _BF16)),
    "an end that is no id": (_changed(eos_token_id=["a"]), ("config.json", "eos_token_id")),
    # weights
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("no .safetensors files", "download complete")),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), ("pickled weights", _SAFE)
    ),
    "pointers": (lambda f: (f / "model.safetensors").write_text(POINTER), ("Git LFS pointer", "git lfs pull")),
    "an empty file": (_bytes(b""), ("model.safetensors", "0 bytes", "again")),
    "a damaged header": (_bytes(b"\xff" * 100), ("model.safetensors", "header", "again")),
    "a header that is no JSON": (
        _bytes((20).to_bytes(8, "little") + b"x" * 40), ("model.safetensors", "header", "again")
    ),
    "a header longer than the file": (
        _bytes((10_000).to_bytes(8, "little") + b"{}"), ("model.safetensors", "10000", "10 bytes", "again")
    ),
    "a torn file": (_cut, ("model.safetensors", "bytes", "again")),
    "a torn shard": (_cut_shard, ("model-00002-of-00002.safetensors", "bytes", "again")),
    "a missing shard": (
        lambda f: in_shards(f, without=2), ("index", "model-00002-of-00002.safetensors", "missing", "download complete")
    ),
    "an index of a file that never was": (
        lambda f: in_shards(f, {Q: "model-00003-of-00002.safetensors"}), ("index", "model-00003-of-00002.safetensors")
    ),
    "an index that errs": (
        lambda f: in_shards(f, {Q: "model-00002-of-00002.safetensors"}),
        ("index", Q, "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"),
    ),
    "an index that is none": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        ("model.safetensors.index.json", "not an index"),
    ),
    "a tensor twice": (_twice, (Q, "a.safetensors", "b.safetensors")),
    "a tensor of another shape": (
        _tensors(shapes={Q: (8, 16)}), (Q, "[8, 16]", "[16, 16]", "config.json")
    ),
    "a tensor too few": (_tensors(shapes={Q: ()}), ("lacks", Q, "config.json")),
    "a tensor too many": (
        _tensors(shapes={"model.layers.0.self_attn.gate.weight": (16, 16)}),
        ("model.layers.0.self_attn.gate.weight", "LlamaForCausalLM"),
    ),
    "text half of a model of pictures": (
        _tensors(lambda name: f"language_model.{name}"), ("language_model.", "images")
    ),
    "half a download": (half_downloaded, ("model.safetensors", "download")),
    # other things than a checkpoint
    "an adapter": (_only("adapter_config.json", "{}"), ("LoRA adapter", "--lora")),
    "an adapter's weights": (
        lambda f: write_weights(f / "model.safetensors", {"model.layers.0.self_attn.q_proj.lora_A.weight": (2, 16)}),
        ("LoRA adapter", "--lora"),
    ),
    "an empty GGUF file": (_only("model-Q4_K_M.gguf"), ("model-Q4_K_M.gguf", "empty", "download")),
    "a pipeline of pictures": (_only("model_index.json"), ("diffusers",)),
    "a maker's own format": (_only("params.json"), ("own format", "config.json")),
    # tokenizer
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), ("no tokenizer.json",)),
    "a SentencePiece tokenizer": (
        lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
        ("tokenizer.model", "save_pretrained", "tokenizer_config.json"),
    ),
    "a pointer as tokenizer": (lambda f: (f / "tokenizer.json").write_text(POINTER), ("tokenizer.json", "Git LFS")),
    "half a tokenizer": (
        lambda f: (f / "tokenizer.json").write_text('{"model": {"vo'), ("tokenizer.json", "no tokenizer", "again")
    ),
    "a tokenizer of another model": (
        lambda f: write_tokenizer(f, 50), ("tokenizer.json", "50", "config.json", "vocab_size", "32")
    ),
}  # fmt: skip
