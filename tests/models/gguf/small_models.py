"""Small models whose weights follow from their names, so that a file that was made of them can be checked anywhere.

    python -m tests.models.gguf.small_models LLAMA_CPP_SOURCE

makes `files/`: for each model its config.json, and what llama.cpp's own converter makes of the checkpoint, packed by
xz: weights that repeat themselves need next to nothing.
"""

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

FILES = Path(__file__).with_name("files")
_TYPES = (
    "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4",
    "glm4_moe", "gpt2", "gpt_oss", "granite", "granitemoeshared", "llama", "ministral3", "mixtral", "olmo2", "olmo3",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gpt2": {"n_ctx": 512},
    "qwen3_moe": {"norm_topk_prob": True},
}
_QUANTIZED = ("gemma2", "gpt_oss", "llama", "mixtral", "qwen2")
"""Those of which there is a Q8_0 file, too."""


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """fp16: multiples of 1 / 64 up to 2, no two rows alike, exact in every type of floats."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 37 + crc32(name.encode()) % 251) % 251 / 64 - 2).half().view(shape)


def main(source: str) -> None:
    """Make all files."""
    import transformers
    from safetensors.torch import save_file

    from penstock.models.families.registry import expected_tensors, parse_model_config
    from tests.gpu_worker.transformers_checkpoints import small_config

    FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        jobs: dict[str, list[str]] = {"f16": [], "q8_0": []}
        for kind in _TYPES:
            folder = Path(temporary, kind)
            folder.mkdir()
            config = small_config(kind, **_CHANGES.get(kind, {}))
            config.architectures = [transformers.AutoModelForCausalLM.from_config(config).__class__.__name__]
            fields = json.loads(config.to_json_string(use_diff=False))
            kept = {name: value for name, value in fields.items() if value is not None or name in ("sliding_window",)}
            (folder / "config.json").write_text(json.dumps(kept))
            (FILES / f"{kind}.json").write_text(json.dumps(kept))
            tensors = expected_tensors(parse_model_config(kept)) or {}
            save_file({name: weight(name, shape) for name, shape in tensors.items()}, folder / "model.safetensors")
            for name in ("tokenizer.json", "tokenizer_config.json"):  # the converter looks at how many tokens there are
                (folder / name).write_text(
                    json.dumps({"model": {"vocab": dict.fromkeys(map(str, range(512)))}, "added_tokens": []})
                )
            jobs["f16"] += [str(folder), str(folder) + ".gguf"]
            if kind in _QUANTIZED:
                jobs["q8_0"] += [str(folder), str(folder) + "-q8_0.gguf"]
        for kind, files in jobs.items():
            convert = Path(__file__).with_name("convert.py")
            subprocess.run([sys.executable, convert, source, kind, "-", *files], check=False)
        for made in sorted(Path(temporary).glob("*.gguf")):
            (FILES / f"{made.name}.xz").write_bytes(lzma.compress(made.read_bytes(), preset=9))


if __name__ == "__main__":
    main(sys.argv[1])
