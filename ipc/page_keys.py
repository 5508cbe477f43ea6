"""What a page of KV holds, as a short key that is the same in every process and after every restart.

    root     blake2b(namespace)
    page     blake2b(key of the page before, int32 tokens of the page, marks)
    mark     of each image that has positions in the page: its key, int32 of the page's first position - the image's

Placeholders of images are equal tokens: marks tell apart what stands behind them.

Equal keys mean equal tokens and images at equal positions after equal ones, for one model and one page size: whoever
keeps pages for longer than a worker lives, or compares those of several engines, must keep these apart himself. Engines
name pages of lower tiers by them, and tell frontends by them what they have cached, which then look up prompts.
"""

import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Protocol

KEY_BYTES = 16

SHORT_BYTES = 8
"""Of a key, as it travels: enough to expect a page, where the engine compares the tokens themselves."""


class Shown(Protocol):
    """An image at positions [start, start + length)."""

    @property
    def key(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...


def image_marks(images: Iterable[Shown], page_size: int) -> dict[int, bytes]:
    """Return the marks of all pages that have some, by the page's index."""
    marks: dict[int, bytes] = {}
    for image in images:
        for index in range(image.start // page_size, (image.start + image.length - 1) // page_size + 1):
            mark = image.key + struct.pack("<i", index * page_size - image.start)
            marks[index] = marks.get(index, b"") + mark
    return marks


def root_key(namespace: Hashable) -> bytes:
    """Return the key before the first page; a namespace is made of strings and numbers."""
    return blake2b(repr(namespace).encode(), digest_size=KEY_BYTES).digest()


def page_key(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of a page: the key before it, and its tokens, int32[page_size], with its marks behind them."""
    return blake2b(tokens, digest_size=KEY_BYTES, key=parent).digest()


def short_keys(
    namespace: Hashable, tokens: bytes, page_size: int, marks: Mapping[int, bytes] | None = None
) -> Iterator[int]:
    """Yield the short keys of the full pages of these tokens (int32[n]), as numbers, one after the other."""
    width = page_size * 4
    key = root_key(namespace)
    for start in range(0, len(tokens) - width + 1, width):
        content = tokens[start : start + width]
        if marks:
            content += marks.get(start // width, b"")
        key = blake2b(content, digest_size=KEY_BYTES, key=key).digest()
        yield int.from_bytes(key[:SHORT_BYTES], "little")


def namespace_of(
    salt: str, num_prompt_tokens: int, longest_usual_prompt: int, *, is_each_length_special: bool
) -> Hashable:
    """Return whose cached pages a prompt may use: those computed for prompts that understand positions as it does.

    Args:
        salt: of the request.
        num_prompt_tokens: of the request.
        longest_usual_prompt: longer ones are computed in another way; 0: there are none.
        is_each_length_special: and each of them in its own way.
    """
    if not 0 < longest_usual_prompt < num_prompt_tokens:
        return salt
    return salt, num_prompt_tokens if is_each_length_special else 0
