"""Small models that score and classify, and the Python API over them."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from penstock import LLM
from tests.parts.encoders.checkpoints import CASES, SIZES, Case, Reference, add_tokenizer, make

_SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


class Loaded(NamedTuple):
    """A model, and what transformers makes of the same checkpoint."""

    llm: LLM
    reference: Reference
    tokenizer: Tokenizer


Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Load a case, with more in its config.json; `folder` is what the checkpoint's folder is called."""
    with ExitStack() as opened:

        def load_it(case: str, folder: str = "model", **more: Any) -> Loaded:
            path = tmp_path / folder
            path.mkdir(exist_ok=True)
            reference = _decoder(case, path) if case.startswith("Qwen3") else make(CASES[case], path)
            tokenizer = add_tokenizer(path, has_types=reference.case.has_types)
            config = path / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | more))
            return Loaded(opened.enter_context(LLM(path, **_SMALL)), reference, tokenizer)

        yield load_it


def _decoder(name: str, folder: Path) -> Reference:
    """A decoder of this class."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=16, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        max_position_embeddings=256,
    )  # fmt: skip
    config.num_labels = 1
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.15 * torch.randn_like(weight) + (weight.ndim == 1))
    model.save_pretrained(folder)
    return Reference(folder, model, Case(name, "Qwen3Config", {}))
