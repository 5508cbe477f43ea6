"""Checkpoint folders without weights: a public model's config.json, and a tokenizer that can spell any of its ids."""

import json
import shutil
from pathlib import Path

SHAPES = Path(__file__).parent / "shapes"


def shape_folder(name: str) -> Path:
    """The folder of a shape, for `--load-format dummy`."""
    return SHAPES / name


def servable_folder(name: str, target: Path) -> Path:
    """A copy of a shape with a tokenizer: bytes are its first 256 ids, all others spell five characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(SHAPES / name / "config.json", target)
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {f"{i:05x}": i for i in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    return target
