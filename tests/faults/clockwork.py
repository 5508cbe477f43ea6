"""A folder with the clockwork model, and the oracle that says what its streams must be."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.clockwork.model import FIRST, LAST, next_token
from tests.e2e.checkpoints import make_tokenizer


def make_clockwork(folder: Path, step_seconds: float = 0.0, token_seconds: float = 0.0, max_len: int = 4096) -> Path:
    """Write config.json and a tokenizer of one token per byte."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["ClockworkForCausalLM"],
        "model_type": "clockwork",
        "dtype": "float32",
        "vocab_size": make_tokenizer(folder),
        "hidden_size": 2,
        "intermediate_size": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": max_len,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "step_seconds": step_seconds,
        "token_seconds": token_seconds,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a greedy sequence must be, whatever happens around it."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def expected_text(prompt: Sequence[int], num_tokens: int) -> str:
    """The same as its client reads it."""
    tokens = expected_tokens(prompt, num_tokens)
    assert all(FIRST <= token <= LAST for token in tokens)
    return "".join(chr(ord("!") + token - FIRST) for token in tokens)
