"""The checkpoint's tokenizer: text to ids in worker threads, ids to text in the event loop.

Only the `tokenizers` library is used: importing transformers would cost seconds and hundreds of MB. What transformers
adds to tokenizer.json (the added and special tokens of tokenizer_config.json and special_tokens_map.json) is applied
here.

Tokens become text one at a time, never half a character. Tokenizers of language models spell bytes: byte-level BPE
maps each of the 256 bytes to a printable character; sentencepiece-like ones write `\u2581` for a space and `<0xE2>`
for a byte without a piece of its own. So each token is a run of bytes that does not depend on its neighbours, and an
incremental UTF-8 decoder over those bytes yields the text: O(1) per token, independent of how tokens are grouped.
Invalid bytes become U+FFFD as soon as they are certain to be invalid. Tokenizers with another spelling (word pieces)
use the library's own `DecodeStream`.
"""

import asyncio
import codecs
import hashlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from penstock.config import ConfigError
from penstock.models.files.source import Checkpoint

T = TypeVar("T")

NUM_THREADS = 2
"""Threads in which texts become tokens."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LIST_NAMES = ("additional_special_tokens", "extra_special_tokens")
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
    """The bytes of each token, and the texts of tokens that are whole characters; filled in when first needed."""

    def __init__(self, tokenizer: Tokenizer, *, is_byte_level: bool, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level
        self.special_ids = special_ids
        self._spelled: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}
        """The texts of tokens seen so far that are valid UTF-8 by themselves."""

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
            except KeyError:  # an added token with characters outside the byte alphabet is its own text
                return token.encode()
        if match := _BYTE_PIECE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()


class ByteDetokenizer:
    """Detokenizer over `ByteSpelling`. The usual case, whole characters after whole characters, costs one look-up."""

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


def _decoder_of(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The decoder as tokenizer.json has it. Writing the whole tokenizer would take half a second if it is large."""
    decoder = tokenizer.decoder
    return None if decoder is None else dict(msgspec.json.decode(decoder.__getstate__()))


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


class TextTokenizer:
    """Encodes and decodes; makes one `Detokenizer` per sequence."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, Any], num_threads: int = NUM_THREADS) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens  # by transformers' names, as chat templates see them
        kind = spelling_kind(_decoder_of(tokenizer))
        added = tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        special_ids = frozenset(self._special_ids.values())
        self._spelling = (
            None
            if kind == "other"
            else ByteSpelling(tokenizer, is_byte_level=kind == "byte_level", special_ids=special_ids)
        )
        begins = tokenizer.encode("", add_special_tokens=True).ids[:1]
        self._added_bos = self.bos_token_id if begins and begins[0] == self.bos_token_id else None
        """The token that begins every text, if the tokenizer adds it."""
        marks = tokenizer.encode("a", add_special_tokens=True).special_tokens_mask
        first = next((i for i, mark in enumerate(marks) if not mark), 0)
        last = next((i for i, mark in enumerate(reversed(marks)) if not mark), 0)
        self.added = first, last
        """How many special tokens the tokenizer puts before a text, and behind it."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    @property
    def threads(self) -> ThreadPoolExecutor:
        """The threads in which text is processed off the event loop."""
        return self._threads

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model's may be larger."""
        return self._tokenizer.get_vocab_size()

    @cached_property
    def identity(self) -> str:
        """A digest of what it does: that of two tokenizers is equal if all texts and tokens are to them."""
        digest = hashlib.sha256(self._tokenizer.to_str().encode())
        digest.update(msgspec.json.encode(self.special_tokens, order="sorted"))
        return digest.hexdigest()

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens, including added ones."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token, if it has one."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def bos_token_id(self) -> int | None:
        """The id of its beginning-of-sequence token, if it has one."""
        token = self.special_tokens.get("bos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool, seam: str = "") -> list[int]:
        """Text to ids, in the calling thread; those of the seam are left out (see `child.py`).

        A text that begins with the token that begins texts gets no second one.
        """
        ids = self._encode(text, add_special_tokens=add_special_tokens, seam=seam)
        has_two = add_special_tokens and self._added_bos is not None and ids[:2] == [self._added_bos] * 2
        return ids[1:] if has_two else ids

    def _encode(self, text: str, *, add_special_tokens: bool, seam: str) -> list[int]:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not seam:
            return encoding.ids
        pieces = [text[start:end] for start, end in encoding.offsets]
        if all(seam not in piece or piece == seam for piece in pieces):
            return [token_id for token_id, piece in zip(encoding.ids, pieces, strict=True) if piece != seam]
        # A token joins the seam with its neighbours, so the parts between seams are tokenized one by one.
        first, *rest = text.split(seam)
        ids = self._encode(first, add_special_tokens=add_special_tokens, seam="")
        return [*ids, *(i for part in rest for i in self._encode(part, add_special_tokens=False, seam=""))]

    def encode_pair(self, first: str, second: str, *, most: int = 0, most_of_second: int = 0) -> tuple[list[int], int]:
        """Two texts to the ids of both, in the calling thread.

        Args:
            first: a text.
            second: another one.
            most: ids that are returned: the longer text is cut; 0: all.
            most_of_second: of these for the second text, which is cut; 0: all.

        Returns:
            the ids, and where the second text begins if the tokenizer gives its tokens a type of their own; else 0.
        """
        encoding = self._tokenizer.encode(first, second, add_special_tokens=True)
        if most_of_second or 0 < most < len(encoding.ids):
            room = max(2, (most or len(encoding.ids)) - self._tokenizer.num_special_tokens_to_add(is_pair=True))
            one, other = (self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
            if most_of_second:
                other.truncate(most_of_second)
            lengths = _shares(len(one.ids), len(other.ids), room)
            one.truncate(lengths[0])
            other.truncate(lengths[1])
            encoding = self._tokenizer.post_process(one, other, add_special_tokens=True)
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    async def encode_all(self, texts: list[str], *, add_special_tokens: bool, seam: str = "") -> list[list[int]]:
        """Texts to ids, off the event loop."""

        def encode_each() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens, seam=seam) for text in texts]

        return await asyncio.get_running_loop().run_in_executor(self._threads, encode_each)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of all ids at once, as the library decodes it."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do other work on many tokens in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def decode_off_loop(self, token_ids: list[int]) -> str:
        """As `decode`, but off the event loop: for lists that a client chooses."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.decode, token_ids)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token spells, in UTF-8, perhaps not whole characters; None for an unknown id."""
        if self._tokenizer.id_to_token(token_id) is None:
            return None
        if self._spelling is None:
            return self.decode([token_id]).encode()
        return self._spelling[token_id]

    def detokenizer(self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh detokenizer for one sequence's output; it never skips the ids in `shown`."""
        if self._spelling is None:  # the library skips all special tokens or none
            return StreamDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens and not shown)
        return ByteDetokenizer(self._spelling, skip_special_tokens=skip_special_tokens, shown=shown)

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text in the vocabulary, if there is one."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    @property
    def special_texts(self) -> frozenset[str]:
        """How the special tokens are spelled."""
        return frozenset(self._special_ids)

    @property
    def added_texts(self) -> frozenset[str]:
        """How the tokens are spelled that are no part of the usual vocabulary: special ones, and other marks."""
        return frozenset(token.content for token in self._tokenizer.get_added_tokens_decoder().values())

    def special_ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The ids of those texts that are special tokens."""
        return frozenset(self._special_ids[text] for text in texts if text in self._special_ids)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept: as many of both, unless one is shorter than half of the room."""
    half = room // 2
    if first <= half:
        return first, min(second, room - first)
    if second <= room - half:
        return min(first, room - second), second
    return half, room - half


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _ListedToken(msgspec.Struct):
    """An entry of tokenizer_config.json's added_tokens_decoder."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


def load_tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    """The checkpoint's tokenizer.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    try:
        tokenizer = Tokenizer.from_buffer(checkpoint.tokenizer())
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"the tokenizer.json of {str(checkpoint.path)!r} is no usable tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, checkpoint.tokenizer_config)
    special_tokens = special_tokens_of(checkpoint)
    known = [AddedToken(text, special=True, normalized=False) for text in _texts(special_tokens)]
    tokenizer.add_special_tokens([token for token in known if tokenizer.token_to_id(token.content) is not None])
    return TextTokenizer(tokenizer, special_tokens)


def special_texts_of(checkpoint: Checkpoint) -> set[str]:
    """How the checkpoint's special tokens are spelled; read without making a tokenizer."""
    found = set(_texts(special_tokens_of(checkpoint)))
    with suppress(OSError, ConfigError, msgspec.MsgspecError):  # `load_tokenizer` says what is wrong with it
        file = msgspec.json.decode(checkpoint.tokenizer(), type=_TokenizerFile)
        found.update(token.content for token in file.added_tokens if token.special)
    listed = checkpoint.tokenizer_config.get("added_tokens_decoder")
    entries = listed.values() if isinstance(listed, dict) else ()
    return found | {entry["content"] for entry in entries if entry.get("special")}


def special_tokens_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Special tokens by their names in chat templates: texts, or lists of texts."""
    config = checkpoint.tokenizer_config
    found: dict[str, Any] = {name: text for name in _SPECIAL_NAMES if (text := _text(config.get(name))) is not None}
    for name in _LIST_NAMES:
        values = config.get(name)
        if isinstance(values, list):
            texts = [text for value in values if (text := _text(value)) is not None]
            found.setdefault("additional_special_tokens", texts)
    return found


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that tokenizer_config.json lists and tokenizer.json lacks; they must get the listed ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    try:
        entries = {int(key): msgspec.convert(value, _ListedToken) for key, value in listed.items()}
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"tokenizer_config.json: added_tokens_decoder: {error}") from None
    for token_id, entry in sorted(entries.items()):
        if tokenizer.token_to_id(entry.content) is not None:
            continue
        flags = {name: getattr(entry, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(entry.content, special=entry.special, **flags)
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
        if tokenizer.token_to_id(entry.content) != token_id:
            raise ConfigError(
                f"tokenizer_config.json gives {entry.content!r} the id {token_id}, "
                f"tokenizer.json makes it {tokenizer.token_to_id(entry.content)}"
            )


def _text(value: Any) -> str | None:
    """A token's text: written plainly, or as an object with its flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _texts(special_tokens: dict[str, Any]) -> list[str]:
    return [
        text
        for value in special_tokens.values()
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str)
    ]
