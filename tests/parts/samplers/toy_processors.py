"""Logits processors as somebody else writes them."""

from collections.abc import Callable
from typing import Any

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


def returning(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """One that returns what are no logits."""
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "nothing": lambda logits: None,
        "sparse": Tensor.to_sparse,
        "meta": lambda logits: logits.to("meta"),
        "complex": lambda logits: torch.complex(logits, logits),
        "nested": lambda logits: torch.nested.nested_tensor([logits]),
        "resized": lambda logits: logits.resize_(3),
    }
    return lambda _, logits: kinds[kind](logits)


def writing() -> Callable[[Tensor, Tensor], Tensor]:
    """One that writes to the tokens that it gets."""

    def process(token_ids: Tensor, logits: Tensor) -> Tensor:
        token_ids.fill_(1 << 30)
        return logits

    return process


def shortening() -> Callable[[Tensor, Tensor], Tensor]:
    """One that returns too little."""
    return lambda _, logits: logits[:-1]
