"""Two small tokenizers of the kinds that models have: byte-level BPE, and BPE over pieces with a mark for blanks."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_TEXT = [
    '{"name": "value", "id": 12345, "tags": ["a", "b"], "score": -0.75, "next": null, "is_open": true}',
    '{"a":1,"b":[1,2,3],"c":{"d":"2024-02-29T12:30:00Z","e":"someone@example.org"}}',
    "The quick brown fox jumps over the lazy dog; 3.14159, 2.71828, 1e-9, 100, 1000, 0.29, 0.01",
    '"ünï": "naïve é€", "two words": "x", "https://example.org/a?b=c": false, [], {}, [[]], [{}]',
]
EOS = "</s>"


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """As GPT-2's and most newer models'."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def pieces(vocab_size: int = 520) -> Tokenizer:
    """As Llama 2's and Gemma's: blanks are written as a mark, and bytes are the last resort."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"[0-9]|[^0-9]+"), "isolated")
    bytes_of_last_resort = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", EOS, *bytes_of_last_resort], show_progress=False
    )
    trained.train_from_iterator(_TEXT, trainer)
    source = json.loads(trained.to_str())
    source["added_tokens"] = source["added_tokens"][:2]
    tokenizer = Tokenizer.from_str(json.dumps(source))
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer
