"""Token ids to text, one token at a time, never half a character.

Tokenizers of language models spell bytes: byte-level BPE maps each of the 256 bytes to a printable
character; sentencepiece-like ones write `\u2581` for a space and `<0xE2>` for a byte without a piece of
its own. So each token is a run of bytes that does not depend on its neighbours, and an incremental
UTF-8 decoder over those bytes gives the text: O(1) per token, independent of how tokens are grouped,
and invalid bytes become U+FFFD as soon as they are certain to be invalid.

Tokenizers that spell otherwise (word pieces) go through the library's own `DecodeStream`.
"""

import codecs
import re
from contextlib import suppress
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class Detokenizer(Protocol):
    """The text of one sequence of tokens, as it grows."""

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; possibly none."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        ...


class ByteSpelling:
    """The bytes of each token, and the texts of tokens that are whole characters, filled in as they are first met."""

    def __init__(self, tokenizer: Tokenizer, *, is_byte_level: bool, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level
        self.special_ids = special_ids
        self._spelled: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}
        """Of tokens already met that are valid UTF-8 by themselves."""

    def __getitem__(self, token_id: int) -> bytes:
        spelled = self._spelled.get(token_id)
        if spelled is None:
            token = self._tokenizer.id_to_token(token_id)
            spelled = self._spelled[token_id] = b"" if token is None else self._spell(token)
            with suppress(UnicodeDecodeError):
                self.whole_texts[token_id] = spelled.decode()
        return spelled

    def _spell(self, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token with characters outside the byte alphabet stands for itself
                return token.encode()
        if match := _BYTE_PIECE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()


class ByteDetokenizer:
    """Detokenizer over `ByteSpelling`. The usual token, whole characters after whole characters, is one look-up."""

    __slots__ = ("_decoder", "_is_between_characters", "_skip", "_spelling", "_whole_texts")

    def __init__(
        self, spelling: ByteSpelling, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> None:
        """Special tokens are skipped if `skip_special_tokens`, except those in `shown`."""
        self._spelling = spelling
        self._whole_texts = spelling.whole_texts
        self._skip = spelling.special_ids - shown if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between_characters = True

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        if self._is_between_characters:
            text = self._whole_texts.get(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._spelling[token_id])
        self._is_between_characters = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class StreamDetokenizer:
    """Detokenizer over the library's `DecodeStream`, for tokenizers whose tokens depend on their neighbours."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._unfinished: list[int] = []

    def feed(self, token_id: int) -> str:
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._unfinished.append(token_id)
            return ""
        self._unfinished.clear()
        return text

    def flush(self) -> str:
        unfinished, self._unfinished = self._unfinished, []
        return self._tokenizer.decode(unfinished, skip_special_tokens=self._skip_special_tokens)


def spelling_kind(decoder: dict[str, Any] | None) -> str:
    """How a tokenizer.json's decoder spells: "byte_level", "space_mark" or "other"."""
    parts = _decoder_parts(decoder)
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return "byte_level"
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not kinds or not all(kind in known for kind in kinds):
        return "other"
    marks = [
        part.get("replacement") == _SPACE_MARK
        if part["type"] == "Metaspace"
        else part.get("pattern") == {"String": _SPACE_MARK} and part.get("content") == " "
        for part in parts
        if part["type"] in ("Replace", "Metaspace")
    ]
    return "space_mark" if marks == [True] else "other"


def _decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return list(decoder["decoders"])
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte, inverted: printable Latin-1 stands for itself, the rest is shifted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(shifted)}


_BYTE_OF_CHARACTER = _byte_alphabet()
