"""The demo model's byte-level BPE tokenizer, trained on the text that the model learns."""

import itertools
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from penstock.demo.chatml import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END
from penstock.demo.corpus import conversations

VOCAB_SIZE = 4096
_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's, with single digits


def train_tokenizer(seed: int, num_conversations: int = 40_000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on conversations of its own seed; digits stay single so that sums can be learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def _texts(seed: int, num_conversations: int) -> Iterator[str]:
    for messages in itertools.islice(conversations(seed), num_conversations):
        for message in messages:
            yield message["content"]
    yield "user\nassistant\nsystem\n" * 2000
