"""Whether a checkpoint can be served, said in milliseconds, before any process starts."""

from pathlib import Path

from penstock.core.checkpoint.folder import eos_token_ids, read_json
from penstock.core.checkpoint.model_config import CLOCKWORK, parse_model_config, quantized
from penstock.core.checkpoint.weight_files import refuse_pointer, stored_tensors
from penstock.core.config.options import ConfigError

_OLD_QUANTIZED = {"quantize_config.json": "GPTQ, as quantize_config.json says", "quant_config.json": "AWQ"}
_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "*.tiktoken", "vocab.json")


def check_checkpoint(folder: Path, *, with_weights: bool = True, with_tokenizer: bool = True) -> None:
    """Look at everything that can be known without reading a tensor.

    Raises:
        ConfigError: one clear sentence: what is not supported, missing or damaged, and what to do.
    """
    refuse_pointer(folder / "config.json")
    raw = read_json(folder / "config.json")
    for name, method in _OLD_QUANTIZED.items():
        if (folder / name).is_file():
            raise quantized(method)
    config = parse_model_config(raw)
    eos_token_ids(folder)
    if with_tokenizer:
        check_tokenizer_file(folder)
    if with_weights and config.architecture != CLOCKWORK:
        stored_tensors(folder, config)


def check_tokenizer_file(folder: Path) -> None:
    """Make sure that there is a tokenizer.json.

    Raises:
        ConfigError: there is none, or what git has in its place.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        refuse_pointer(path)
        return
    other = next((found.name for name in _OTHER_TOKENIZERS for found in sorted(folder.glob(name))), None)
    if other is None:
        raise ConfigError(f"{str(folder)!r} has no tokenizer.json: a checkpoint needs one to be served")
    raise ConfigError(
        f"{str(folder)!r} has {other} and no tokenizer.json, which alone is read: transformers can write one "
        "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder)) if tokenizer_config.json is there too; "
        "else take it from the model's page"
    )
