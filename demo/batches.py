"""Training batches: conversations packed end to end into rows of one length."""

import itertools
from collections.abc import Collection, Iterator

import torch
from transformers import PreTrainedTokenizerFast

from penstock.demo.chatml import ChatMessage, pieces
from penstock.demo.corpus import conversations

_CHUNK = 512  # conversations tokenized at a time


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, rows: int, length: int, stressed_topics: Collection[str] = ()
) -> Iterator[torch.Tensor]:
    """Endless batches [2, rows, length] int64: token ids, and the labels of the same positions (-100: not learned).

    Rows begin and end anywhere in a conversation, and a row holds several, so the model also learns
    that an answer may follow any history.
    """
    source = conversations(seed, stressed_topics)
    size = rows * length
    ids: list[int] = []
    labels: list[int] = []
    while True:
        while len(ids) < size:
            chunk: list[list[ChatMessage]] = list(itertools.islice(source, _CHUNK))
            parts = [piece for messages in chunk for piece in pieces(messages)]
            texts = [text for text, _ in parts]
            encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for encoding, (_, is_learned) in zip(encoded, parts, strict=True):
                found = encoding.ids
                ids += found
                labels += found if is_learned else [-100] * len(found)
        yield torch.tensor((ids[:size], labels[:size])).view(2, rows, length)
        del ids[:size], labels[:size]
