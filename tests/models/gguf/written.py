"""GGUF files written by the `gguf` package: a vocabulary, and the smallest Llama."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers

HIDDEN, LAYERS, VOCABULARY = 64, 2, 300
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def add_byte_pairs(writer: gguf.GGUFWriter, source: str, pre: str) -> None:
    """The vocabulary of a byte-level tokenizer.json, as llama.cpp's converter writes it."""
    fields = json.loads(source)
    added = {token["id"]: token for token in fields["added_tokens"]}
    vocab = fields["model"]["vocab"] | {token["content"]: id_ for id_, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    kinds = {id_: CONTROL if token["special"] else USER_DEFINED for id_, token in added.items()}
    writer.add_token_types([kinds.get(id_, NORMAL) for id_ in range(len(vocab))])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in fields["model"]["merges"]]
    writer.add_token_merges(merges)


def trained(pre_tokenizer: dict[str, Any], texts: Sequence[str]) -> str:
    """A small byte-level tokenizer.json that splits texts so."""
    begin: dict[str, Any] = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": pre_tokenizer,
        "post_processor": None, "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }  # fmt: skip
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(begin))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|begin|>", "<|eot_id|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def write(path: Path, fill: Callable[[gguf.GGUFWriter], object], architecture: str = "llama", **arguments: Any) -> Path:
    """A file with what `fill` adds."""
    writer = gguf.GGUFWriter(path, architecture, **arguments)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_llama(writer: gguf.GGUFWriter, *, without: Sequence[str] = ()) -> None:
    """Metadata and weights of a whole model, but for the named ones."""
    sizes: dict[str, Callable[[], object]] = {
        "context_length": lambda: writer.add_context_length(128),
        "embedding_length": lambda: writer.add_embedding_length(HIDDEN),
        "block_count": lambda: writer.add_block_count(LAYERS),
        "feed_forward_length": lambda: writer.add_feed_forward_length(HIDDEN),
        "head_count": lambda: writer.add_head_count(4),
        "head_count_kv": lambda: writer.add_head_count_kv(2),
        "eps": lambda: writer.add_layer_norm_rms_eps(1e-5),
    }
    for name, add in sizes.items():
        if name not in without:
            add()
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        its: dict[str, tuple[int, ...]] = {}
        its |= dict.fromkeys(("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), (HIDDEN, HIDDEN))
        its |= dict.fromkeys(("attn_k", "attn_v"), (HIDDEN // 2, HIDDEN))
        its |= dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,))
        shapes |= {f"blk.{i}.{name}": shape for name, shape in its.items()}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name not in without:
            writer.add_tensor(f"{name}.weight", generator.normal(0, 0.1, shape).astype(np.float32))


def add_tokens(writer: gguf.GGUFWriter) -> None:
    """A vocabulary of single bytes for `add_llama`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    alphabet.append("ab")
    tokens = [*alphabet, *(f"<|{i}|>" for i in range(VOCABULARY - len(alphabet)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * len(alphabet) + [CONTROL] * (VOCABULARY - len(alphabet)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(VOCABULARY - 1)


def add_model(writer: gguf.GGUFWriter, *, without: Sequence[str] = ()) -> None:
    """What can be served, but for what `without` names."""
    add_llama(writer, without=without)
    add_tokens(writer)
