"""Token ids of simulated prompts: they share prefixes exactly where the load says so."""

import numpy as np

from penstock.lab.simulation.arrivals import PAGE_NAME_BYTES, Arrival

_POOL = 1 << 20
"""Size of the pool that prompts are cut out of. Cuts at different places differ from the first page on."""

_STRIDE = 7919  # odd, so that as many prompts as there are ids in the pool begin at different places


class Prompts:
    """Makes the prompts of one load, in its order."""

    def __init__(self, vocab_size: int, page_size: int, longest: int, seed: int) -> None:
        """`page_size`: tokens of a page that an arrival's `pages` name. `longest`: tokens of the longest prompt."""
        rng = np.random.default_rng(seed)
        self._page_size = page_size
        self._own, self._shared = (rng.integers(0, vocab_size, _POOL + longest, dtype=np.int32) for _ in range(2))
        self._prefixes: dict[str, int] = {}
        self._num_made = 0

    def make(self, arrival: Arrival) -> bytes:
        """int32[input_len]"""
        self._num_made += 1
        prefix = self._prefix(arrival)
        own_len = arrival.input_len - len(prefix) // 4
        return prefix + _cut(self._own, self._num_made, own_len)

    def _prefix(self, arrival: Arrival) -> bytes:
        if arrival.prefix_id:
            number = self._prefixes.setdefault(arrival.prefix_id, len(self._prefixes))
            return _cut(self._shared, number, min(arrival.prefix_len or arrival.input_len, arrival.input_len))
        names, size = arrival.pages, PAGE_NAME_BYTES
        pages = [
            _cut(self._shared, int.from_bytes(names[i : i + size], "little"), self._page_size)
            for i in range(0, len(names), size)
        ]
        return b"".join(pages)[: 4 * arrival.input_len]


def _cut(pool: "np.ndarray[tuple[int], np.dtype[np.int32]]", number: int, length: int) -> bytes:
    begin = number * _STRIDE % _POOL
    return pool[begin : begin + length].tobytes()
