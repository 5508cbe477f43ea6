"""How text is split before byte pairs are merged, by `tokenizer.ggml.pre`.

GGUF files have only a name. It stands for one or more regular expressions, each of which splits the pieces left by the
ones before. They are taken from the tokenizer.json files to which llama.cpp's converter gives these names.
"""

from typing import Any

from penstock.config.options import ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)

_GPT2: tuple[str, ...] = ()
"""The byte-level pre-tokenizer's own expression."""
_DIGITS_FIRST = ("digits",)
"""Each digit by itself, then as GPT-2."""

_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"): (_QWEN2,),
    ("qwen35",): (_QWEN35,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4", "minimax-m2"): (_GPT4O,),
    ("seed-coder",): (_SEED,),
    ("deepseek-v3", "hunyuan-dense"): _DEEPSEEK3,
    ("gpt-2", "mpt", "olmo", "phi-2", "jais", "exaone4", "trillion", "default", ""): _GPT2,
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"): _DIGITS_FIRST,
}
_BY_NAME = {name: split for names, split in _SPLITS.items() for name in names}

PRE_TOKENIZERS = tuple(sorted(name for name in _BY_NAME if name))
"""The known names."""

IGNORING_MERGES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "glm4"))
"""Kinds in which a word that is a token is taken as it is, even if no merges lead to it."""
ADDING_BOS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"))
"""Kinds that put the BOS token before texts unless the file says otherwise."""


def pre_tokenizer(name: str) -> dict[str, Any]:
    """Return the part of tokenizer.json that splits texts.

    Raises:
        ConfigError: the name is unknown.
    """
    split = _BY_NAME.get(name)
    if split is None:
        raise ConfigError(
            f"GGUF files whose texts are split as by {name[:64]!r} (tokenizer.ggml.pre) are not supported; "
            f"supported: {', '.join(PRE_TOKENIZERS)}"
        )
    if split in (_GPT2, _DIGITS_FIRST):
        digits = [{"type": "Digits", "individual_digits": True}] if split else []
        return _sequence([*digits, _byte_level(use_regex=True)])
    patterns = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in split
    ]
    return _sequence([*patterns, _byte_level(use_regex=False)])


def _sequence(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}
