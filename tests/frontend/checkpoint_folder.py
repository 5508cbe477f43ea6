"""A checkpoint folder with everything the frontend reads, and no weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'refused' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}"
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_SENTENCES = [
    "Water runs down the pipe and turns the wheel.",
    "The gate opens slowly, and the river waits behind it.",
    "A token is a piece of a word; a page holds sixteen of them.",
    "Hello world, how are you today? I am fine, thank you.",
]


VOCAB_SIZE = 384
"""As the engine would report it: padded beyond the tokenizer's 363."""


def byte_level_tokenizer() -> Tokenizer:
    """A small byte-level BPE like GPT-2's and Qwen's: special tokens first, then the 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES * 20, trainer)
    return tokenizer


def write_checkpoint(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    chat_template: Any = CHATML,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Write the folder; EOS is <|im_end|> and <|endoftext|>."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    config = {
        "model_type": "llama", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "eos_token_id": eos[0]
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|endoftext|>", "special": True, "__type": "AddedToken"},
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    generation = {"eos_token_id": eos, "temperature": 0.7, "top_p": 0.9, "top_k": 20, **(generation_config or {})}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder
