"""What a server has answered lately, against a search of all of it by hand; and who may find it."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from penstock.parts.drafts.worker.drafter import Int32Array
from penstock.parts.drafts.worker.lookup.ngram import following
from penstock.parts.drafts.worker.lookup.recent_outputs import MIN_SIZE, RecentOutputs, namespace_of

A, B = namespace_of(""), namespace_of("tenant b")


def ints(tokens: list[int]) -> Int32Array:
    return np.array(tokens, dtype=np.int32)


def by_hand(outputs: list[list[int]], end: list[int]) -> tuple[list[list[int]], int]:
    """What follows the longest part of an end in the outputs, the latest last; and its size."""
    for size in range(len(end), MIN_SIZE - 1, -1):
        part = end[-size:]
        if found := [each[i:] for each in outputs for i in range(size, len(each) + 1) if each[i - size : i] == part]:
            return found, size
    return [], 0


def told(kept: RecentOutputs, place: int) -> list[int]:
    text: list[int] = kept.tokens[place:].tolist()
    return text[: text.index(-1)]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_end_is_found_among_those_that_are_kept(seed: int) -> None:
    rng = Random(seed)
    num_tokens, most = rng.choice([(64, 100), (256, 100), (256, 4), (4096, 1000)])
    kept = RecentOutputs(num_tokens, most)
    added: dict[int, list[list[int]]] = {A: [], B: []}
    order: list[int] = []
    for _ in range(60):
        namespace = rng.choice([A, B])
        output = [rng.randrange(4) for _ in range(rng.randint(0, 16))]
        kept.add(namespace, ints(output))
        if len(output) > MIN_SIZE:
            added[namespace].append(output)
            order.append(namespace)
        namespace = rng.choice([A, B])
        end = [rng.randrange(4) for _ in range(rng.randint(1, 8))]
        places, size = kept.find(namespace, ints(end))
        # No more than `most` outputs are kept, nor more tokens than there is room for.
        recent = {each: added[each][len(added[each]) - order[-most:].count(each) :] for each in added}
        expected, longest = by_hand(recent[namespace], end)
        found = [told(kept, place) for place in places.tolist()]
        if num_tokens == 4096:
            assert size == longest
            assert found == expected[-len(found) :] if found else not expected
        else:
            assert size <= longest
            assert not Counter(map(tuple, found)) - Counter(map(tuple, by_hand(recent[namespace], end[-size:])[0]))


def test_the_oldest_are_forgotten_first() -> None:
    kept = RecentOutputs(64, 100)
    for i in range(20):
        kept.add(A, ints([100 + i] * 3 + [200 + i] * 3))
    is_there = [kept.find(A, ints([100 + i] * 3))[1] > 0 for i in range(20)]
    assert is_there == sorted(is_there)
    assert 6 <= sum(is_there) <= 9  # seven tokens each
    kept.clear()
    assert kept.find(A, ints([119] * 3))[1] == 0


def test_another_namespace_finds_nothing() -> None:
    kept = RecentOutputs(1024, 100)
    kept.add(A, ints([1, 2, 3, 4, 5, 6]))
    places, size = kept.find(A, ints([9, 1, 2, 3]))
    assert size == 3
    assert following(kept.tokens, places, 8) == [4, 5, 6]
    assert kept.find(B, ints([9, 1, 2, 3]))[1] == 0
    kept.add(B, ints([1, 2, 3, 7, 8]))
    places, _ = kept.find(B, ints([1, 2, 3]))
    assert following(kept.tokens, places, 8) == [7, 8]


def test_a_long_output_is_kept_by_its_end() -> None:
    kept = RecentOutputs(64, 10)
    kept.add(A, ints([*range(100)]))
    assert kept.find(A, ints([40, 41, 42]))[1] == 0
    places, _ = kept.find(A, ints([90, 91, 92]))
    assert following(kept.tokens, places, 3) == [93, 94, 95]
