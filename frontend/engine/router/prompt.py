"""The tokens of a request, as the engines' caches know them."""

from collections.abc import Iterator, Sequence
from itertools import chain

from penstock.frontend.engine.router.cached_pages import CachedPages
from penstock.ipc.messages import ImageRef
from penstock.ipc.page_keys import image_marks, namespace_of, short_keys

_Kind = tuple[int, int, bool]
"""Page size, longest usual prompt, whether each longer one is special: engines with equal values share keys."""


class Prompt:
    """The tokens before a sequence's next token: its prompt, and its outputs if it has moved."""

    __slots__ = (
        "_adapter",
        "_images",
        "_keys",
        "_num_prompt_tokens",
        "_rest",
        "_salt",
        "_tokens",
        "num_sequences",
        "num_tokens",
    )

    def __init__(
        self,
        tokens: bytes,
        salt: str,
        num_prompt_tokens: int,
        num_sequences: int,
        images: Sequence[ImageRef] = (),
        adapter: str = "",
    ) -> None:
        """`tokens`: int32[n], of which the first `num_prompt_tokens` are the prompt, with these images."""
        self._images = images
        self._tokens = tokens
        self._salt = salt
        self._adapter = adapter
        self._num_prompt_tokens = num_prompt_tokens
        self._keys: dict[_Kind, list[int]] = {}
        self._rest: dict[_Kind, Iterator[int]] = {}  # keys that were not needed so far
        self.num_tokens = len(tokens) // 4
        self.num_sequences = num_sequences

    def keys(self, cached: CachedPages) -> Iterator[int]:
        """Yield the short keys of the prompt's full pages as this engine makes them; each is computed once, on demand.

        The last token is computed in any case, so a page that ends with it is left out.
        """
        size = cached.page_size
        if not size:
            return
        kind = size, cached.longest_usual_prompt, cached.is_each_length_special
        keys = self._keys.get(kind)
        if keys is None:
            keys = self._keys[kind] = []
            namespace = namespace_of(
                self._salt, self._num_prompt_tokens, kind[1], is_each_length_special=kind[2], adapter=self._adapter
            )
            self._rest[kind] = short_keys(namespace, self._tokens[:-4], size, image_marks(self._images, size))
        yield from chain(list(keys), _kept(self._rest[kind], keys))


def _kept(rest: Iterator[int], keys: list[int]) -> Iterator[int]:
    for key in rest:
        keys.append(key)
        yield key
