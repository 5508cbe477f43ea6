"""How evenly tokens go to ranks, by what these tell."""

from penstock.parts.experts.messages import ExpertTokens, LayerTokens
from penstock.parts.experts.scheduler import ExpertCounts


def test_a_rank_without_tokens_counts() -> None:
    counts = ExpertCounts(num_ranks=4)
    counts.add(2, ExpertTokens((LayerTokens(0, 8, {4: 100}),)), now=1.0)
    assert counts.imbalance() == {"0": 4.0}
    for rank in (0, 1, 3):
        counts.add(rank, ExpertTokens((LayerTokens(0, 8, {2 * rank: 100}),)), now=1.0)
    assert counts.imbalance() == {"0": 1.0}
    assert counts.tokens_of_ranks == {"2": 100, "0": 100, "1": 100, "3": 100}


def test_counts_are_told_when_they_have_changed() -> None:
    counts = ExpertCounts(num_ranks=1)
    assert counts.news(100.0) is None
    counts.add(0, ExpertTokens((LayerTokens(3, 2, {1: 5, 7: 9}),)), now=100.0)
    news = counts.news(100.0)
    assert news is not None
    assert [(layer.layer, layer.tokens) for layer in news.layers] == [(3, (0, 5))]
    assert counts.news(1000.0) is None
