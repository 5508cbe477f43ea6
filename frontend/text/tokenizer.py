"""The checkpoint's tokenizer: text to ids in worker threads, ids to text in the event loop.

Only the `tokenizers` library is used: importing transformers would cost seconds and hundreds of MB.
What transformers adds on top of tokenizer.json, the added and special tokens of tokenizer_config.json
and special_tokens_map.json, is applied here.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer

from penstock.core.checkpoint.source import Checkpoint
from penstock.core.config import ConfigError
from penstock.frontend.text.detokenize import (
    ByteDetokenizer,
    ByteSpelling,
    Detokenizer,
    StreamDetokenizer,
    spelling_kind,
)

T = TypeVar("T")

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LIST_NAMES = ("additional_special_tokens", "extra_special_tokens")


class TextTokenizer:
    """Encodes and decodes; makes one `Detokenizer` per sequence."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, Any], num_threads: int = 2) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens  # by transformers' names: what chat templates see
        kind = spelling_kind(msgspec.json.decode(tokenizer.to_str(), type=_TokenizerFile).decoder)
        added = tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        special_ids = frozenset(self._special_ids.values())
        self._spelling = (
            None
            if kind == "other"
            else ByteSpelling(tokenizer, is_byte_level=kind == "byte_level", special_ids=special_ids)
        )
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Where text is processed off the event loop."""
        return self._threads

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's may be larger."""
        return self._tokenizer.get_vocab_size()

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token, if it has one."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool, seam: str = "") -> list[int]:
        """Text to ids, in the calling thread; those of the seam are left out (see `plain_text.py`)."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not seam:
            return encoding.ids
        pieces = [text[start:end] for start, end in encoding.offsets]
        if all(seam not in piece or piece == seam for piece in pieces):
            return [token_id for token_id, piece in zip(encoding.ids, pieces, strict=True) if piece != seam]
        # A token joins the seam with its neighbours: then the parts between them are read one by one.
        first, *rest = text.split(seam)
        ids = self.encode(first, add_special_tokens=add_special_tokens)
        return [*ids, *(i for part in rest for i in self.encode(part, add_special_tokens=False))]

    async def encode_all(self, texts: list[str], *, add_special_tokens: bool, seam: str = "") -> list[list[int]]:
        """Texts to ids, off the event loop."""

        def encode_each() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens, seam=seam) for text in texts]

        return await asyncio.get_running_loop().run_in_executor(self._threads, encode_each)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """A whole text, as the library decodes it."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do other work over many tokens in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def decode_off_loop(self, token_ids: list[int]) -> str:
        """The same, off the event loop, for lists of a client's choosing."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.decode, token_ids)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a token spells, in UTF-8 and perhaps not whole characters; None for an unknown id."""
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
        """The id of the token that is written so in the vocabulary, if there is one."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def special_ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        """The ids of those texts that are special tokens."""
        return frozenset(self._special_ids[text] for text in texts if text in self._special_ids)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    decoder: dict[str, Any] | None = None


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
    """How the checkpoint's special tokens are spelled; read without making a tokenizer of it."""
    found = set(_texts(special_tokens_of(checkpoint)))
    with suppress(OSError, ConfigError, msgspec.MsgspecError):  # `load_tokenizer` says what is wrong with it
        file = msgspec.json.decode(checkpoint.tokenizer(), type=_TokenizerFile)
        found.update(token.content for token in file.added_tokens if token.special)
    listed = checkpoint.tokenizer_config.get("added_tokens_decoder")
    entries = listed.values() if isinstance(listed, dict) else ()
    return found | {entry["content"] for entry in entries if entry.get("special")}


def special_tokens_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Names, as chat templates see them, to texts (lists of texts for the list-valued ones)."""
    config = checkpoint.tokenizer_config
    found: dict[str, Any] = {name: text for name in _SPECIAL_NAMES if (text := _text(config.get(name))) is not None}
    for name in _LIST_NAMES:
        values = config.get(name)
        if isinstance(values, list):
            texts = [text for value in values if (text := _text(value)) is not None]
            found.setdefault("additional_special_tokens", texts)
    return found


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add what tokenizer_config.json lists and tokenizer.json lacks; its ids must come out as listed."""
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
