"""Identifies the content of a KV page by a short key that is the same in every process and after every restart.

    root     blake2b(namespace)
    page     blake2b(key of the page before, int32 tokens of the page, marks)
    mark     of each image that has positions in the page: its key, int32 of the page's first position - the image's

The placeholders of all images are equal tokens; marks tell the images apart.

For one model and one page size, equal keys mean equal tokens and images at equal positions after equal ones. Code that
keeps pages for longer than a worker lives, or compares pages of several engines, must itself separate models and page
sizes. Engines name pages of lower tiers by keys, and report by keys what they have cached; frontends look up prompts.
"""

import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Protocol

KEY_BYTES = 16

SHORT_BYTES = 8
"""Length of a key in messages: enough to expect a page there; the engine itself compares the tokens."""


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
    """Return a page's key, from the key before it and its tokens (int32[page_size], followed by the page's marks)."""
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
    salt: str,
    num_prompt_tokens: int,
    longest_usual_prompt: int,
    *,
    is_each_length_special: bool,
    adapter: str = "",
) -> Hashable:
    """Return a prompt's namespace. Prompts that share cached pages have salt and adapter in common, and treat positions
    alike.

    Args:
        salt: of the request.
        num_prompt_tokens: of the request.
        longest_usual_prompt: longer prompts treat positions differently; 0: none do.
        is_each_length_special: longer prompts of different lengths also differ from each other.
        adapter: its key; empty: none.
    """
    namespace: Hashable = salt
    if 0 < longest_usual_prompt < num_prompt_tokens:
        namespace = salt, num_prompt_tokens if is_each_length_special else 0
    return (adapter, namespace) if adapter else namespace
