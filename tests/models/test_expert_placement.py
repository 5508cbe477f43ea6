"""Where experts are placed: every one somewhere, as many on each rank, and tokens as equal as copies allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.models.shards.placement import RanksOf, place_experts


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, int, int, list[int] | None]:
    num_experts, num_ranks = draw(st.integers(1, 24)), draw(st.integers(1, 9))
    num_redundant = draw(st.integers(max(0, num_ranks - num_experts), num_experts * (num_ranks - 1)))
    numbers = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 10**12))
    tokens = draw(st.none() | st.lists(numbers, min_size=num_experts, max_size=num_experts))
    return num_experts, num_ranks, num_redundant, tokens


def loads(placed: RanksOf, num_ranks: int, tokens: list[int]) -> list[float]:
    """Tokens of each rank, if copies share theirs."""
    shares = [count / len(ranks) for count, ranks in zip(tokens, placed, strict=True)]
    return [sum(s for s, ranks in zip(shares, placed, strict=True) if rank in ranks) for rank in range(num_ranks)]


@given(_cases())
def test_a_placement(case: tuple[int, int, int, list[int] | None]) -> None:
    num_experts, num_ranks, num_redundant, tokens = case
    placed = place_experts(*case)
    assert place_experts(*case) == placed, "all ranks place them alike"
    assert len(placed) == num_experts
    assert all(ranks and list(ranks) == sorted(set(ranks)) for ranks in placed), "each somewhere, once on a rank"
    assert sum(map(len, placed)) == num_experts + num_redundant
    sizes = [sum(rank in ranks for ranks in placed) for rank in range(num_ranks)]
    assert max(sizes) - min(sizes) <= 1
    if tokens is not None:
        found = loads(placed, num_ranks, tokens)
        share = max(count / len(ranks) for count, ranks in zip(tokens, placed, strict=True))
        assert max(found) <= (sum(found) / num_ranks + share) * (1 + 1e-9)


def test_without_loads_experts_stay_in_their_order() -> None:
    assert place_experts(8, 2) == ((0,),) * 4 + ((1,),) * 4
    assert [len([e for e in place_experts(10, 4) if e == (rank,)]) for rank in range(4)] == [3, 2, 3, 2]


def test_copies_go_to_those_that_many_tokens_go_to() -> None:
    tokens = [1000, 10, 10, 10, 10, 10, 10, 400]
    placed = place_experts(8, 4, 4, tokens)
    assert [len(ranks) for ranks in placed] == [4, 1, 1, 1, 1, 1, 1, 2]
    found, before = loads(placed, 4, tokens), loads(place_experts(8, 4), 4, tokens)
    mean = sum(tokens) / 4
    assert max(found) / mean < 1.3 < 2.7 < max(before) / mean


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((4, 8), "fewer than 8 ranks"),
        ((4, 2, 5), "--num-redundant-experts is 5; with 4 experts on 2 ranks it may be at most 4"),
        ((4, 2, 0, [1, 2, 3]), "tokens of 3 experts are known, but there are 4"),
    ],
)
def test_refused(arguments: tuple[int, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        place_experts(*arguments)
