"""A model of a public shape that quotes: its greedy text is known beforehand, and computed as any model's is.

The weights are made, not trained: what follows a token depends on that token only. The embedding is random, the row of
the head for a token is the embedding of the token before it, and what the layers add is too small to change which
logit is the largest. The layers have random weights and are computed in full, so a step costs what it costs with the
real weights. All harmless ids are on one ring. A text that walks along it is what the model writes; a prompt may quote
parts of it, in any order, among other tokens.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from bench.shapes_folder import NUM_BYTES, described, servable_folder
from penstock.models.families.registry import expected_tensors

_SEED = 0
_SMALL = 2e-4  # standard deviation of what writes to the residual stream, in which the embedding's is 1
_MADE = "made"


class Asked(NamedTuple):
    """A prompt, and the tokens that the model will answer."""

    prompt: list[int]
    answer: list[int]


def ring(vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids in the order in which the model writes them; the last is followed by the first."""
    return np.random.default_rng(_SEED).permutation(np.arange(NUM_BYTES, vocab_size - 1024))


def make_checkpoint(shape: str, folder: Path) -> Path:
    """A folder with config, tokenizer and weights; made if it is not there yet."""
    target = folder / f"{shape}-quoting"
    if (target / _MADE).is_file():
        return target
    shutil.rmtree(target, ignore_errors=True)
    servable_folder(shape, target)
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(_weights(target), target / "model.safetensors", metadata={"format": "pt"})
    (target / _MADE).touch()
    return target


def make_draft(target: Path, num_layers: int) -> Path:
    """The first layers of a model made above, which writes the same text: a draft model that is always right."""
    draft = target.with_name(f"{target.name}-draft-{num_layers}")
    if (draft / _MADE).is_file():
        return draft
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(target, draft, ignore=shutil.ignore_patterns("model.safetensors", _MADE))
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (draft / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = load_file(target / "model.safetensors")
    kept = {name: weights[name].clone() for name in expected_tensors(described(draft)) or {}}
    save_file(kept, draft / "model.safetensors", metadata={"format": "pt"})
    (draft / _MADE).touch()
    return draft


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    config = described(folder)
    dtype = getattr(torch, config.checkpoint_dtype)
    generator = torch.Generator().manual_seed(_SEED)
    found: dict[str, torch.Tensor] = {}
    for name, shape in (expected_tensors(config) or {}).items():
        if len(shape) == 1:
            found[name] = torch.zeros(shape, dtype=dtype) if name.endswith("bias") else torch.ones(shape, dtype=dtype)
        elif "embed" in name or "lm_head" not in name:
            is_written = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 1.0 if "embed" in name else _SMALL if is_written else 0.02
            found[name] = torch.empty(shape).normal_(0, deviation, generator=generator).to(dtype)
    ids = torch.from_numpy(ring(config.vocab_size))
    [embedding] = [weight for name, weight in found.items() if "embed" in name]
    head = torch.zeros_like(embedding)
    head[ids.roll(-1)] = 0.05 * embedding[ids]
    return found | {"lm_head.weight": head}


def quoting(vocab_size: int, num_answer: int, num_prompt: int, seed: int) -> Asked:
    """A document, and a summary in its words: quotations of 8 to 40 tokens, with 3 to 6 new ones between them.

    The document has the quotations in another order, with other text around them.
    """
    ids, rng = ring(vocab_size), np.random.default_rng(seed)
    start = int(rng.integers(ids.shape[0]))
    answer = np.take(ids, range(start, start + num_answer + 1), mode="wrap")
    quoted, at = list[list[int]](), 1
    while at < num_answer:
        size = int(rng.integers(8, 41))
        quoted.append(answer[at : at + size].tolist())
        at += size + int(rng.integers(3, 7))
    rng.shuffle(quoted)
    num_other = max(0, num_prompt - 1 - sum(map(len, quoted)))
    other = np.array_split(rng.choice(ids, num_other), len(quoted))
    prompt = [token for each, more in zip(quoted, other, strict=True) for token in (*more.tolist(), *each)]
    return Asked([*prompt, int(answer[0])], answer[1:].tolist())


def unknown(vocab_size: int, num_answer: int, num_prompt: int, seed: int) -> Asked:
    """Random text: nothing of the answer is in the prompt."""
    ids, rng = ring(vocab_size), np.random.default_rng(seed)
    start = int(rng.integers(ids.shape[0]))
    answer = np.take(ids, range(start, start + num_answer + 1), mode="wrap")
    prompt = rng.choice(np.setdiff1d(ids, answer), num_prompt - 1)
    return Asked([*prompt.tolist(), int(answer[0])], answer[1:].tolist())


def misleading(vocab_size: int, num_answer: int, num_prompt: int, seed: int) -> Asked:
    """Text that drafts fail on: pairs of the answer's tokens are in the prompt, and something else follows each."""
    ids, rng = ring(vocab_size), np.random.default_rng(seed)
    start = int(rng.integers(ids.shape[0]))
    answer = np.take(ids, range(start, start + num_answer + 1), mode="wrap")
    others = np.setdiff1d(ids, answer)
    pairs = [[int(a), int(b), *rng.choice(others, 2).tolist()] for a, b in pairwise(answer)]
    rng.shuffle(pairs)
    prompt = [token for pair in pairs for token in pair]
    prompt += rng.choice(others, max(0, num_prompt - 1 - len(prompt))).tolist()
    return Asked([*prompt, int(answer[0])], answer[1:].tolist())
