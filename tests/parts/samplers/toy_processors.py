"""Logits processors as somebody else writes them."""

from collections.abc import Callable

import torch
from torch import Tensor


class Only:
    """Draws one of some tokens, in turns."""

    def __init__(self, tokens: list[int]) -> None:
        if not tokens:
            raise ValueError("tokens must not be empty")
        self._tokens = tokens

    def __call__(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        token = self._tokens[token_ids.shape[0] % len(self._tokens)]
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([token], device=logits.device), 0.0)


def failing(after: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
    """One that fails once there are so many tokens."""

    def process(token_ids: Tensor, logits: Tensor) -> Tensor:
        if token_ids.shape[0] >= after:
            raise RuntimeError("there are too many tokens")
        return logits

    return process


def shortening() -> Callable[[Tensor, Tensor], Tensor]:
    """One that returns too little."""
    return lambda _, logits: logits[:-1]
