"""A random checkpoint with a byte-level tokenizer and a chat template: everything a server needs."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make_tokenizer(folder: Path) -> int:
    """Write a tokenizer of one token per byte (plus the special ones); returns the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocabulary)


def make_checkpoint(folder: Path, **changes: Any) -> transformers.PreTrainedModel:
    """Save a random Llama with a tokenizer; returns transformers' model of it, in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "vocab_size": make_tokenizer(folder),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.12,  # wide enough that the two best logits are well apart
        "eos_token_id": 2,
        "bos_token_id": 1,
        "dtype": "float32",
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(settings | changes))
    model: transformers.PreTrainedModel = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates greedily, EOS ignored."""
    output = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in output[0, len(prompt) :]]
