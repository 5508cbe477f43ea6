"""The outputs that a server has given lately, with an index of their n-grams.

It answers what a suffix automaton over the outputs would answer: the longest end of a sequence that occurs in them, and
what followed there. Its memory is fixed from the start: 28 bytes for each token that is kept. The tokens are in a ring
buffer. Each place has a link to the previous occurrence of the same n-gram, as in compressors (Deutsch, RFC 1951,
section 4). The oldest outputs are overwritten first.
"""

from collections import deque
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from penstock.parts.drafts.worker.drafter import Int32Array
from penstock.parts.drafts.worker.lookup.ngram import Places, longest_match

MIN_SIZE = 3
"""Tokens of the indexed n-grams, and so of the shortest match."""

_MAX_PLACES = 64
"""How many of the latest places of an n-gram are checked."""

_END = -1
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def namespace_of(cache_salt: str) -> int:
    """A number for a cache salt, the same on every rank."""
    return int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest(), "little", signed=True)


class RecentOutputs:
    """What is added in a namespace is found only in that namespace."""

    def __init__(self, num_tokens: int, num_outputs: int) -> None:
        """The most tokens (a power of two) and outputs (at least one) that are kept."""
        self.tokens: Int32Array = np.full(num_tokens, _END, dtype=np.int32)
        """int32[num_tokens]; each output is contiguous, and a negative number follows it."""
        self._num_outputs = num_outputs
        # These are by place, except the last one. Places count on from lap to lap of the ring; 0 is no place.
        self._namespaces = np.zeros(num_tokens, dtype=np.int64)
        self._before = np.zeros(num_tokens, dtype=np.int64)  # by place: where an n-gram with the same hash was before
        self._latest = np.zeros(num_tokens, dtype=np.int64)  # by hash
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._latest[:] = 0
        self._next = 1  # place
        self._starts = deque[int]()  # of the outputs

    def add(self, namespace: int, output: Int32Array) -> None:
        """Keep an output, int32[n] without negative numbers. Of a very long output only the end is kept."""
        num_kept = self.tokens.shape[0]
        output = output[-num_kept // 4 :]
        size = output.shape[0]
        if size <= MIN_SIZE:  # no match could have a token after it
            return
        if self._next % num_kept + size >= num_kept:
            self._next += num_kept - self._next % num_kept  # the next lap
        start, at = self._next, self._next % num_kept
        self.tokens[at : at + size] = output
        self.tokens[at + size] = _END
        self._namespaces[at : at + size] = namespace
        hashes = self._hashes(namespace, output)
        order = hashes.argsort(kind="stable")
        ordered, places = hashes[order], start + MIN_SIZE - 1 + order
        is_first = np.ones(ordered.shape[0], dtype=np.bool_)
        is_first[1:] = ordered[1:] != ordered[:-1]
        self._before[places % num_kept] = np.where(is_first, self._latest[ordered], np.roll(places, 1))
        is_last = np.roll(is_first, -1)
        self._latest[ordered[is_last]] = places[is_last]
        self._next += size + 1
        self._starts.append(start)
        while len(self._starts) > self._num_outputs or self._starts[0] < self._next - num_kept:
            self._starts.popleft()

    def find(self, namespace: int, tokens: Int32Array) -> tuple[Places, int]:
        """Find the longest end of some tokens, int32[n], in the outputs.

        Returns:
            int64[P], the latest last, where in `self.tokens` the following tokens begin; and how long the found end is.
            If nothing is found, P and the length are 0.
        """
        found: list[int] = []
        if tokens.shape[0] >= MIN_SIZE and self._starts:
            num_kept, oldest = self.tokens.shape[0], self._starts[0]
            place = int(self._latest[self._hashes(namespace, tokens[-MIN_SIZE:])[0]])
            while place >= oldest and len(found) < _MAX_PLACES:
                found.append(place % num_kept)
                place = int(self._before[found[-1]])
        places = np.array(found[::-1], dtype=np.int64)
        places = places[self._namespaces[places] == namespace]
        if places.shape[0]:
            places, size = longest_match(self.tokens, places, tokens)
            if size >= MIN_SIZE:
                return places + 1, size
        return places[:0], 0

    def _hashes(self, namespace: int, tokens: Int32Array) -> npt.NDArray[np.int64]:
        """int64[n - MIN_SIZE + 1], the hash of each n-gram, less than the number of tokens that are kept."""
        count = tokens.shape[0] - MIN_SIZE + 1
        mixed = np.full(count, namespace).view(np.uint64)
        for i in range(MIN_SIZE):
            mixed = (mixed ^ tokens[i : i + count].astype(np.uint64)) * _PRIME
            mixed ^= mixed >> np.uint64(32)
        found: npt.NDArray[np.int64] = (mixed & np.uint64(self.tokens.shape[0] - 1)).astype(np.int64)
        return found
