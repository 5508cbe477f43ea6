"""Checkpoint folders without weights: a public model's config.json, and a tokenizer that can spell any of its ids."""

import json
import shutil
from pathlib import Path

from penstock.models.description.model_config import ModelConfig
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.registry import open_checkpoint

SHAPES = Path(__file__).parent / "shapes"
NUM_BYTES = 256
"""Ids of single bytes: the first ones."""

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def shape_folder(name: str) -> Path:
    """The folder of a shape, for `--load-format dummy`."""
    return SHAPES / name


def described(folder: Path) -> ModelConfig:
    """The model of a folder that may have a config.json alone."""
    return parse_model_config(open_checkpoint(folder).config)


def servable_folder(name: str, target: Path) -> Path:
    """A copy of a shape with a tokenizer: bytes are its first 256 ids, a pair merges, all others spell five characters.

    The pair is there because some readers of tokenizers refuse a list of merges that is empty.
    """
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(SHAPES / name / "config.json", target)
    _write_tokenizer(target, json.loads((target / "config.json").read_text())["vocab_size"])
    return target


def _write_tokenizer(target: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= {f"{i:05x}": i for i in range(NUM_BYTES, vocab_size - 1)} | {"zz": vocab_size - 1}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[("z", "z")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
