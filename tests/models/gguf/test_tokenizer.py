"""Tokenizers made of GGUF's metadata: ids are those of transformers, of what was written, of SentencePiece."""

import json
import lzma
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from penstock.config import Config, ConfigError
from penstock.frontend.text.tokenizer import load_tokenizer
from penstock.models.files.source import Checkpoint, eos_token_ids
from penstock.models.finding.registry import open_checkpoint, open_model
from penstock.models.gguf.pre_tokenizers import ADDING_BOS, pre_tokenizer
from tests.models.gguf.small_models import FILES
from tests.models.gguf.written import CONTROL, VOCABULARY, add_byte_pairs, add_llama, trained, write

_TEXTS = [
    "Hello world", "  two spaces, and  more", "", "a", "the page of a sequence\n\nis 16 tokens\r\n ",
    "Ünïcödé ☃ 漢字 🙂", "numbers 1234567 and 3.14, 0x1F", "tabs\tand\nnewlines\n", "def f(x):\n    return x + 1\n",
    "We're HERE, I'LL go; don't", " leading", "trailing ", "camelCaseWords and CONSTANT_NAMES",
    "https://example.org/?q=1&r=2", "مرحبا بالعالم", "e\u0301 o\u0308", "<|begin|>chat<|eot_id|>\nnext",
    "一二三 ひらがな カタカナ mixed 漢字text", "!!!???...", "don't  \n\n  stop",
]  # fmt: skip
_DOCUMENT = Path(__file__).parents[3] / "docs" / "architecture.md"


def _ids(checkpoint: Checkpoint, text: str) -> list[int]:
    return load_tokenizer(checkpoint).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"])
def test_byte_pairs_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    """What it makes of the same file; ids with what is put around texts are those of its post-processor."""
    written = trained(pre_tokenizer(pre), _DOCUMENT.read_text().splitlines())
    path = write(tmp_path / "vocabulary.gguf", lambda writer: add_byte_pairs(writer, written, pre))
    architecture, fields, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, fields)
    ours, original = open_checkpoint(path), Tokenizer.from_str(written)
    for text in _TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert _ids(ours, text) == expected
        assert original.encode(text, add_special_tokens=False).ids == expected
        assert load_tokenizer(ours).decode(expected) == original.decode(expected, skip_special_tokens=False)


@pytest.mark.parametrize("pre", ["gpt-2", "starcoder", "seed-coder", "deepseek-v3"])
def test_byte_pairs_are_those_that_were_written(pre: str, tmp_path: Path) -> None:
    written = trained(pre_tokenizer(pre), _DOCUMENT.read_text().splitlines())
    path = write(tmp_path / "vocabulary.gguf", lambda writer: add_byte_pairs(writer, written, pre))
    ours, original = open_checkpoint(path), Tokenizer.from_str(written)
    for text in _TEXTS:
        assert _ids(ours, text) == original.encode(text, add_special_tokens=False).ids


def test_the_demo_models_tokenizer_comes_back(tmp_path: Path) -> None:
    demo = open_model(Config())
    source = demo.tokenizer().decode()

    def fill(writer: gguf.GGUFWriter) -> None:
        add_byte_pairs(writer, source, "starcoder")  # digits by themselves, then as GPT-2
        writer.add_eos_token_id(2)
        writer.add_chat_template(demo.chat_template() or "")

    ours = open_checkpoint(write(tmp_path / "demo.gguf", fill))
    for text in [*_TEXTS, _DOCUMENT.read_text()]:
        assert _ids(ours, text) == _ids(demo, text)
    assert ours.chat_template() == demo.chat_template()
    assert set(ours.generation_config["eos_token_id"]) == set(eos_token_ids(demo)) == {0, 2}
    assert load_tokenizer(ours).special_tokens["eos_token"] == "<|im_end|>"


_SENTENCEPIECE: dict[str, Any] = json.loads(lzma.decompress((FILES / "sentencepiece.json.xz").read_bytes()))
"""A vocabulary that SentencePiece trained (byte pairs, with byte fallback), and the ids that it gives texts."""


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(_SENTENCEPIECE["tokens"])
    writer.add_token_scores(_SENTENCEPIECE["scores"])
    writer.add_token_types(_SENTENCEPIECE["types"])


def test_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    ours = load_tokenizer(open_checkpoint(write(tmp_path / "model.gguf", _add_sentencepiece)))
    for text, expected in _SENTENCEPIECE["texts"].items():
        if text.startswith("<think>"):  # the space after a token of its own is another matter: see the next test
            continue
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.encode(text, add_special_tokens=True) == [1, *expected]  # unless the file says otherwise
        assert ours.decode(expected) == text


@pytest.mark.parametrize("architecture", ["phi3", "gemma2"])
def test_ids_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Its classes for Phi-3, which puts a space before texts as all older files do, and for Gemma without one."""
    path = tmp_path / "model.gguf"

    def fill(writer: gguf.GGUFWriter) -> None:
        _add_sentencepiece(writer)
        writer.add_add_space_prefix(architecture == "phi3")

    write(path, fill, architecture=architecture)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    ours = load_tokenizer(open_checkpoint(path))
    for text in [*_TEXTS, "<think> is whole<turn>", "a <think>b"]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [("qwen2", None, False), ("qwen2", True, True), ("tekken", None, True), ("tekken", False, False)],
)
def test_what_is_put_before_a_text(pre: str, said: bool | None, adds: bool, tmp_path: Path) -> None:
    written = trained(pre_tokenizer(pre), ["a few words"])

    def fill(writer: gguf.GGUFWriter) -> None:
        add_byte_pairs(writer, written, pre)
        writer.add_bos_token_id(0)
        if said is not None:
            writer.add_add_bos_token(said)

    ours = load_tokenizer(open_checkpoint(write(tmp_path / "vocabulary.gguf", fill)))
    assert ours.encode("words", add_special_tokens=True)[:1] == (
        [0] if adds else ours.encode("words", add_special_tokens=False)[:1]
    )
    assert (pre in ADDING_BOS) == (pre == "tekken")


def test_all_tokens_that_end_a_text(tmp_path: Path) -> None:
    """A file names one; the others are known by what they are called, if they are control tokens."""

    def fill(writer: gguf.GGUFWriter) -> None:
        tokens = ["<|endoftext|>", "<|im_end|>", "<|return|>", "<|call|>", "<|end|>", "<|eot_id|>", "x"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL] * 5 + [1, 1])
        writer.add_token_merges([])
        writer.add_eos_token_id(1)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_uint32("general.sampling.top_k", 20)

    found = open_checkpoint(write(tmp_path / "vocabulary.gguf", fill)).generation_config
    assert found == {"eos_token_id": [1, 0, 2, 3], "temperature": 0.5, "top_k": 20}


def test_a_token_that_the_model_has_not(tmp_path: Path) -> None:
    """llama.cpp writes -1 for it, in 32 bits without a sign."""

    def fill(writer: gguf.GGUFWriter) -> None:
        add_llama(writer)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
        writer.add_token_merges([])
        writer.add_eos_token_id(1)
        writer.add_bos_token_id(0xFFFFFFFF)
        writer.add_pad_token_id(0xFFFFFFFF)

    found = open_checkpoint(write(tmp_path / "model.gguf", fill))
    assert found.tokenizer_config == {"eos_token": "t1"}
    assert found.generation_config == {"eos_token_id": [1]}
    assert "bos_token_id" not in found.config


@pytest.mark.parametrize(("kind", "pre", "words"), [("bert", "default", "gpt2"), ("gpt2", "poro-chat", "qwen2")])
def test_kinds_that_are_not_supported_are_named(kind: str, pre: str, words: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        add_byte_pairs(writer, trained(pre_tokenizer("gpt-2"), ["a"]), pre)
        writer.kv_data[0]["tokenizer.ggml.model"].value = kind

    with pytest.raises(ConfigError, match=f"{kind if kind == 'bert' else pre}.*{words}"):
        open_checkpoint(write(tmp_path / "vocabulary.gguf", fill)).tokenizer()
