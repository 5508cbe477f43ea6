"""Converts a GGUF file's tokenizer, in `tokenizer.*` of its metadata, to the form of transformers' files.

There are two kinds: byte-level byte pairs ("gpt2"), and SentencePiece's byte pairs over characters ("llama"). The
latter's merges are not in the file, but follow from the scores of its tokens.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from penstock.config.options import ConfigError
from penstock.models.gguf.container import Strings
from penstock.models.gguf.keys import NO_TOKEN
from penstock.models.gguf.pre_tokenizers import ADDING_BOS, IGNORING_MERGES, pre_tokenizer
from penstock.models.parsing.json_fields import JsonFields, shown

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Types of tokens; the other types are normal tokens and bytes."""
_SPACE = "\u2581"
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_INFILL = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
"""Keys of infill tokens; older files use the plain words."""
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Default ids, unless the file has others."""
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "<｜end▁of▁sentence｜>", "</s>", "<eos>",
}  # fmt: skip
"""Control tokens that end a text in every model that has them: a GGUF file names one, but a model may have more."""
_SAMPLING = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p"}

_MAX_CUTS = 200_000_000
"""Characters compared to find merges: tokens of real vocabularies take a hundredth of it."""

_MAX_TEMPLATE = 1 << 20
"""Characters of a chat template: real ones have some thousands."""


class GGUFTokenizer:
    """See the members of `Checkpoint`. Everything is read on demand."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._fields = JsonFields("GGUF metadata", metadata)
        self._is_gemma = architecture.startswith("gemma")

    @cached_property
    def _tokens(self) -> list[str]:
        """All tokens. SentencePiece's runs of spaces are spelled as inside other tokens."""
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, Strings) or not len(tokens):
            raise ConfigError("the GGUF file has no tokens (tokenizer.ggml.tokens), without which it cannot be served")
        if self._kind == "gpt2":
            return list(tokens)
        return [_SPACE * len(token) if token.isspace() and not token.strip(" ") else token for token in tokens]

    @cached_property
    def _types(self) -> Sequence[int]:
        types = self._metadata.get("tokenizer.ggml.token_type")
        return types if isinstance(types, list) and len(types) == len(self._tokens) else [1] * len(self._tokens)

    @cached_property
    def _kind(self) -> str:
        kind = self._fields.text("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise ConfigError(
                f"GGUF files with a tokenizer of kind {shown(kind)!r} are not supported; supported: "
                "gpt2 (byte-level byte pairs), llama (SentencePiece's byte pairs)"
            )
        return kind

    @property
    def _pre(self) -> str:
        return self._fields.text("tokenizer.ggml.pre")

    def generation_config(self) -> dict[str, Any]:
        """Tokens that end a text, and sampling settings that the file recommends."""
        if not self._fields.has("tokenizer.ggml.tokens"):
            return {}  # `tokenizer_json` reports the missing tokenizer if it is needed
        ends = [self._special_id(name) for name in ("eos", "eot", "eom")]
        known = {id_ for id_, kind in enumerate(self._types) if kind == _CONTROL and self._tokens[id_] in _ENDS}
        texts = {self._tokens[id_] for id_ in known}
        if {"<|return|>", "<|call|>"} <= texts:  # Harmony, in which <|end|> only ends a message
            known = {id_ for id_ in known if self._tokens[id_] != "<|end|>"}
        listed = list(dict.fromkeys([id_ for id_ in ends if id_ is not None] + sorted(known)))
        found: dict[str, Any] = {"eos_token_id": listed} if listed else {}
        for key, name in _SAMPLING.items():
            if self._fields.has(f"general.sampling.{key}"):
                found[name] = self._fields.number(f"general.sampling.{key}", 0.0)
        if self._fields.has("general.sampling.top_k"):
            found["top_k"] = self._fields.whole("general.sampling.top_k", least=0)
        return found

    def tokenizer_config(self) -> dict[str, Any]:
        """Special tokens by name."""
        if not self._fields.has("tokenizer.ggml.tokens"):
            return {}
        ids = {name: self._special_id(key) for name, key in _SPECIAL.items()}
        for part, key in _INFILL.items():
            ids[f"{part}_token"] = next(
                (id_ for name in (key, part) if (id_ := self._special_id(name)) is not None), None
            )
        return {name: self._tokens[id_] for name, id_ in ids.items() if id_ is not None}

    def chat_template(self) -> str | None:
        """The default template."""
        template = self._fields.text("tokenizer.chat_template") or None
        if template is not None and len(template) > _MAX_TEMPLATE:
            raise ConfigError(
                f"the GGUF file's chat template has {len(template)} characters; at most {_MAX_TEMPLATE} are read"
            )
        return template

    def tokenizer_json(self) -> bytes:
        """The whole tokenizer.json, for the `tokenizers` library."""
        its = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        added = [
            {
                "id": id_, "content": self._tokens[id_], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": kind in (_CONTROL, _UNKNOWN),
            }
            for id_, kind in enumerate(self._types)
            if kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and self._tokens[id_].strip(_SPACE))
        ]  # fmt: skip
        whole = {"version": "1.0", "added_tokens": added, "post_processor": self._post_processor(), **its}
        return msgspec.json.encode(whole)

    def _byte_level(self) -> dict[str, Any]:
        split, merges = pre_tokenizer(self._pre), self._metadata.get("tokenizer.ggml.merges")
        if not isinstance(merges, Strings):
            raise ConfigError("the GGUF file has no merges (tokenizer.ggml.merges), which its kind of tokenizer needs")
        parts = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return {
            "normalizer": None,
            "pre_tokenizer": split,
            "decoder": {"type": "ByteLevel", **parts},
            "model": {
                "type": "BPE",
                "vocab": self._vocabulary(),
                "merges": list(merges),
                "ignore_merges": self._pre in IGNORING_MERGES,
            },
        }

    def _sentencepiece(self) -> dict[str, Any]:
        has_prefix = self._fields.flag("tokenizer.ggml.add_space_prefix", not self._is_gemma)
        to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
        unknown = self._special_id("unknown")
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, to_marks]},
            "pre_tokenizer": None,
            "decoder": {
                "type": "Sequence",
                "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self._vocabulary(),
                "merges": self._merges(),
            },
        }

    def _vocabulary(self) -> dict[str, int]:
        """The vocabulary, without entries that only fill up the embedding."""
        types = self._types
        return {
            token: id_
            for id_, token in enumerate(self._tokens)
            if types[id_] != _UNUSED or not (token.startswith("[PAD") and token.endswith("]"))
        }

    def _merges(self) -> Sequence[str | tuple[str, str]]:
        """The file's merges, else all pairs of tokens that make a token, those of the best token first.

        In Gemma an earlier token is better: the scores of added tokens do not follow that order.
        """
        said = self._metadata.get("tokenizer.ggml.merges")
        if isinstance(said, Strings):
            return list(said)
        scores = self._metadata.get("tokenizer.ggml.scores")
        tokens = self._tokens
        ids = {token: id_ for id_, token in enumerate(tokens)}
        if self._is_gemma or not isinstance(scores, list) or len(scores) != len(tokens):
            scores = [-id_ for id_ in range(len(tokens))]
        if (work := sum(len(token) ** 2 for token in tokens)) > _MAX_CUTS:
            raise ConfigError(
                f"the GGUF file has no merges, and too long tokens to find them: {work} characters would be compared, "
                f"at most {_MAX_CUTS} are"
            )
        best_first = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
        ranked: list[tuple[float, int, int, str, str]] = []
        for id_ in best_first:
            token = tokens[id_]
            pairs = [
                (ids[left], ids[right], left, right)
                for cut in range(1, len(token))
                if (left := token[:cut]) in ids and (right := token[cut:]) in ids
            ]
            ranked += [(-scores[id_], -len(left), -len(right), left, right) for _, _, left, right in sorted(pairs)]
        ranked.sort(key=lambda each: each[:3])
        return [(left, right) for *_, left, right in ranked]

    def _post_processor(self) -> dict[str, Any] | None:
        """The post-processor, which adds tokens around a text."""
        is_sentencepiece = self._kind == "llama"
        around = {
            "bos": self._fields.flag("tokenizer.ggml.add_bos_token", is_sentencepiece or self._pre in ADDING_BOS),
            "eos": self._fields.flag("tokenizer.ggml.add_eos_token"),
        }
        ids = {name: self._special_id(name) for name, is_added in around.items() if is_added}
        texts = {name: (id_, self._tokens[id_]) for name, id_ in ids.items() if id_ is not None}
        if not texts:
            return None

        def piece(name: str) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": texts[name][1], "type_id": 0}}] if name in texts else []

        single = [*piece("bos"), {"Sequence": {"id": "A", "type_id": 0}}, *piece("eos")]
        special = {text: {"id": text, "ids": [id_], "tokens": [text]} for id_, text in texts.values()}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}

    def _special_id(self, name: str) -> int | None:
        """The id of a special token; None if there is none."""
        key = f"tokenizer.ggml.{name}_token_id"
        usual = _SENTENCEPIECE_IDS.get(name) if self._kind == "llama" else None
        if not self._fields.has(key):
            return usual if usual is not None and usual < len(self._tokens) else None
        id_ = self._fields.whole(key, least=0, most=NO_TOKEN)
        return id_ if id_ < len(self._tokens) else usual
