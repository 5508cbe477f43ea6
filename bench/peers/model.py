"""One random checkpoint of a named shape, and the same weights in the forms that the peers read.

Weights are drawn from one seed, in the config's own dtype. Rows of the embedding that belong to single bytes and to the
end of text are zero: with tied weights their logits are 0, which never is the largest of thousands, so no greedy answer
ends early or stops in half a character, and every server sends a piece of text for every token.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.peers.envs import Environment, PeerError
from bench.peers.formats import AS_STORED, FORMATS, gguf_path
from bench.shapes_folder import NUM_BYTES, described, servable_folder, shape_folder
from penstock.models.families.registry import expected_tensors

_STANDARD_DEVIATION = 0.02
_MADE = "made"


def make_checkpoint(shape: str, models: Path, say: Callable[[str], None]) -> Path:
    """A folder under `models` with config, tokenizer and random weights; made if it is not there yet."""
    target = models / shape
    config = (shape_folder(shape) / "config.json").read_text()
    if (target / _MADE).is_file() and (target / "config.json").read_text() == config:
        say(f"checkpoint: uses {target}")
        return target
    say(f"checkpoint: draws the weights of {shape} in {target}")
    shutil.rmtree(target, ignore_errors=True)
    servable_folder(shape, target)
    save_file(dict(_weights(target)), target / "model.safetensors", metadata={"format": "pt"})
    (target / _MADE).touch()
    return target


def harmless_ids(checkpoint: Path) -> range:
    """The ids of which prompts may consist: no single bytes, nothing special."""
    config = json.loads((checkpoint / "config.json").read_text())
    special = [token for token in _special_ids(config) if token >= NUM_BYTES]
    return range(NUM_BYTES, min([*special, config["vocab_size"]]))


def _weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    config = described(folder)
    dtype = getattr(torch, config.checkpoint_dtype)
    generator = torch.Generator().manual_seed(0)
    silent = [*range(NUM_BYTES), *_special_ids(json.loads((folder / "config.json").read_text()))]
    for name, shape in (expected_tensors(config) or {}).items():
        if len(shape) == 1 and not name.endswith("bias"):
            yield name, torch.ones(shape, dtype=dtype)
            continue
        weight = torch.empty(shape).normal_(0, _STANDARD_DEVIATION, generator=generator).to(dtype)
        if shape[0] == config.vocab_size:
            weight[silent] = 0
        yield name, weight


def _special_ids(config: dict[str, object]) -> list[int]:
    """BOS and EOS, where the config has them."""
    found: list[int] = []
    for name in ("bos_token_id", "eos_token_id"):
        ids = config.get(name)
        found += ids if isinstance(ids, list) else [ids] if isinstance(ids, int) else []
    return found


def to_openvino(env: Environment, checkpoint: Path, weights: str) -> Path:
    """OpenVINO's form, exported as its users would; `weights` is optimum's name of their format.

    Raises:
        PeerError: if the export fails.
    """
    target = checkpoint / ("openvino" if weights == "fp16" else f"openvino-{weights}")
    if not (target / _MADE).is_file():
        shutil.rmtree(target, ignore_errors=True)
        command: list[str | Path] = [
            env.program("optimum-cli"),
            "export",
            "openvino",
            "--model",
            checkpoint,
            "--weight-format",
            weights,
        ]
        env.run("exports the checkpoint", [*command, "--task", "text-generation-with-past", target])
        if not (target / "openvino_model.bin").is_file():
            raise PeerError(f"the export left no openvino_model.bin in {target}")
        (target / _MADE).touch()
    return target


def to_gguf(env: Environment, checkpoint: Path, kind: str) -> Path:
    """llama.cpp's form; `kind` is the name that its own quantizer has for the format.

    Raises:
        PeerError: if the architecture is none that is written here.
    """
    stored = gguf_path(checkpoint, FORMATS[AS_STORED].gguf)
    if not stored.is_file():
        script = Path(__file__).with_name("write_gguf.py")
        env.run("writes the GGUF file", [env.python, script, checkpoint, stored])
    target = gguf_path(checkpoint, kind)
    if not target.is_file():
        partial = target.with_suffix(".partial")
        env.run(f"quantizes the GGUF file to {kind}", [env.program("llama-quantize"), stored, partial, kind])
        partial.rename(target)
    return target
