"""Decides whether tokens travel to experts, or every rank applies its experts to all tokens.

Attention leaves all tokens on all ranks, so the second way costs one sum over the ranks of T tokens: each of R ranks
sends 2 (R - 1) / R * T vectors. The first way sends a rank's T / R tokens to each rank that has an expert for them, and
back, and then gathers all. That is less if a token needs fewer than half of the other ranks. With k experts per token,
spread evenly, a token needs each rank with probability 1 - (1 - 1/R)^k. So there must be many ranks per chosen expert:
three for k = 1, four for 2, seven for 4, thirteen for 8. The first way takes three more exchanges, each of which takes
time however small it is, so tokens of small steps never travel.
"""

_BYTES_OF_AN_EXCHANGE = 1 << 20
"""Bytes that a rank could send in the time of one more exchange: 20 us at 50 GB/s; about the same for slower links."""


def fewest_travelling_tokens(num_ranks: int, top_k: int, bytes_of_token: int) -> int | None:
    """Return the number of tokens in a step from which all-to-all costs less; None: never.

    Args:
        num_ranks: ranks that share the experts.
        top_k: experts per token.
        bytes_of_token: bytes of a token's hidden state.
    """
    others = num_ranks - 1
    needed = others * (1 - (1 - 1 / num_ranks) ** top_k)
    saved = (others - 2 * needed) / num_ranks * bytes_of_token  # per token of the step and rank
    if saved <= 0:
        return None
    return int(3 * _BYTES_OF_AN_EXCHANGE / saved) + 1
