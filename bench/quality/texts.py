"""What models are measured on: held-out conversations of the demo model, or the text of a file."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from penstock.config.options import ConfigError
from penstock.models.files.source import Checkpoint

_SEED = 20
_LEAST = 16  # tokens; a shorter rest of a file is left out


class Text(NamedTuple):
    """Tokens that a model reads at once."""

    token_ids: list[int]
    is_answer: npt.NDArray[np.bool_]
    """bool[T - 1]: whether what follows token i is part of an answer, which the demo model has learned to give."""


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's own."""
    tokenizer: Tokenizer = Tokenizer.from_str(checkpoint.tokenizer().decode())
    return tokenizer


def conversations(tokenizer: Tokenizer, num_tokens: int, context: int) -> list[Text]:
    """Conversations with the demo model, about so many tokens in all. Training never saw their questions.

    Raises:
        ConfigError: they are not there, because this is no clone.
    """
    return list(_until(num_tokens, _encoded_conversations(tokenizer, context)))


def windows(tokenizer: Tokenizer, path: Path, num_tokens: int, context: int) -> list[Text]:
    """The beginning of a text file, cut into windows that a model reads without what is before them.

    Raises:
        ConfigError: it cannot be read, or is too short.
    """
    try:
        ids = tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text {str(path)!r}: {error}") from None
    first = tokenizer.encode("").ids  # what the tokenizer puts before each text
    size = context - len(first)
    found = [first + ids[i : i + size] for i in range(0, min(len(ids), num_tokens), size)]
    texts = [Text(text, np.ones(len(text) - 1, dtype=bool)) for text in found if len(text) >= _LEAST]
    if not texts:
        raise ConfigError(f"{str(path)!r} has {len(ids)} tokens, which is too short to measure anything")
    return texts


def _encoded_conversations(tokenizer: Tokenizer, context: int) -> Iterator[Text]:
    try:  # a wheel has the demo model, but not what it is made of
        from penstock.demo.chatml import pieces
        from penstock.demo.held_out import held_out_conversations
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("penstock.demo"):
            raise
        raise ConfigError(
            "say --text FILE: the conversations of the demo model are not installed, only a clone has them"
        ) from None
    for messages in held_out_conversations(_SEED):
        parts = [(tokenizer.encode(text, add_special_tokens=False).ids, learned) for text, learned in pieces(messages)]
        ids = [token for part, _ in parts for token in part][:context]
        learned = [is_learned for part, is_learned in parts for _ in part][:context]
        yield Text(ids, np.array(learned[1:], dtype=bool))


def _until(num_tokens: int, texts: Iterator[Text]) -> Iterator[Text]:
    count = 0
    while count < num_tokens:
        text = next(texts)
        count += len(text.token_ids)
        yield text
