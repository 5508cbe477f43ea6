"""Where tokens travel to experts."""

from penstock.models.shards.exchange import fewest_travelling_tokens


def test_ranks_must_be_many_for_each_chosen_expert() -> None:
    first = {k: next(r for r in range(2, 99) if fewest_travelling_tokens(r, k, 4096)) for k in (1, 2, 4, 8)}
    assert first == {1: 3, 2: 4, 4: 7, 8: 13}


def test_few_tokens_never_travel() -> None:
    assert (fewest_travelling_tokens(64, 8, 14336) or 0) > 200
    assert (fewest_travelling_tokens(64, 8, 14336) or 0) < 1000


def test_larger_tokens_travel_earlier() -> None:
    found = [fewest_travelling_tokens(16, 2, num_bytes) or 0 for num_bytes in (1024, 4096, 16384)]
    assert found == sorted(found, reverse=True)
