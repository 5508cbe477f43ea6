"""Whether tokens should travel to experts, or every rank compute what its experts make of all tokens.

Attention leaves all tokens on all ranks, so the second way costs one sum over the ranks of T tokens, 2 (R - 1) / R * T
vectors sent by each of R ranks. The first way sends a rank's T / R tokens to each rank that has an expert for them, and
back, and then gathers all: that is less if a token needs fewer than half of the other ranks. With k experts for a
token, spread evenly, it needs each rank with probability 1 - (1 - 1/R)^k; so ranks must be many for each chosen expert:
three for k = 1, four for 2, seven for 4, thirteen for 8. It takes three exchanges more, each of which takes time
however small it is, so few tokens never travel.
"""

_BYTES_OF_AN_EXCHANGE = 1 << 20
"""What a rank could send in the time that one more exchange takes: 20 us at 50 GB/s, and about the same share of slower
links."""


def fewest_travelling_tokens(num_ranks: int, top_k: int, bytes_of_token: int) -> int | None:
    """Tokens of a step from which all-to-all costs less; None: it never does.

    Args:
        num_ranks: that share the experts.
        top_k: experts of a token.
        bytes_of_token: of its hidden state.
    """
    others = num_ranks - 1
    needed = others * (1 - (1 - 1 / num_ranks) ** top_k)
    saved = (others - 2 * needed) / num_ranks * bytes_of_token  # for each token of the step, by each rank
    if saved <= 0:
        return None
    return int(3 * _BYTES_OF_AN_EXCHANGE / saved) + 1
