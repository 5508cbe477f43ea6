"""Training of drafters, and how many of their guesses are right."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from tqdm import tqdm

from penstock.demo.make import schedule
from penstock.demo.speculate.answers import Batch


class Trainee(Protocol):
    """A drafter that learns."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    def loss(self, batch: Batch) -> Tensor:
        """What training makes small."""

    def guesses(self, batch: Batch, num_steps: int) -> Tensor:
        """int64[S, B, T]: what step s guesses for a token, if all guesses before it were right."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""


class Acceptance(NamedTuple):
    """Of the guesses of steps that each guess S tokens at most."""

    num_guessed: list[int]  # at each place: those whose guesses before were right
    num_right: list[int]
    num_steps: int
    num_tokens: int  # that came of them

    @classmethod
    def none(cls, num_drafts: int) -> Self:
        """Of no steps yet."""
        return cls([0] * num_drafts, [0] * num_drafts, 0, 0)

    @property
    def shares(self) -> list[float]:
        """Of each place."""
        return [right / max(1, guessed) for right, guessed in zip(self.num_right, self.num_guessed, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """With the one that the model itself adds."""
        return self.num_tokens / max(1, self.num_steps)


def train(trainee: Trainee, source: Iterator[Batch], num_steps: int, learning_rate: float, name: str) -> None:
    """Train with AdamW, a short warm-up and a cosine to zero."""
    optimizer = torch.optim.AdamW(trainee.module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    bar = tqdm(islice(source, num_steps), total=num_steps, desc=name, unit="step")
    for step, batch in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule(step, num_steps)
        with torch.autocast("cpu", torch.bfloat16, enabled=_has_bf16()):
            loss = trainee.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trainee.module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")


def _has_bf16() -> bool:
    """Whether products of bf16 are faster than of fp32 here."""
    return torch.cpu._is_avx512_bf16_supported()


def acceptance(trainee: Trainee, held_out: list[Batch], num_drafts: int) -> Acceptance:
    """Guess the last answers as an engine would: what comes after the first wrong guess is guessed anew."""
    found = Acceptance.none(num_drafts)
    with torch.autocast("cpu", torch.bfloat16, enabled=_has_bf16()):
        for batch in held_out:
            hits = trainee.guesses(batch, num_drafts) == batch.token_ids
            for row in range(hits.shape[1]):
                found = count_right(found, hits[:, row].tolist(), *_last_answer(batch.is_answer[row].tolist()))
    return found


def _last_answer(is_answer: list[bool]) -> tuple[int, int]:
    end = len(is_answer) - is_answer[::-1].index(True)
    begin = end
    while begin and is_answer[begin - 1]:
        begin -= 1
    return begin, end


def count_right(so_far: Acceptance, hits: list[list[bool]], begin: int, end: int) -> Acceptance:
    """Add the steps of an answer at [begin, end), whose first token is there.

    Args:
        so_far: what is added to.
        hits: of each place in a step, whether its guess for a token is right.
        begin: where the answer begins.
        end: the place behind it.
    """
    guessed, right, num_steps, at = list(so_far.num_guessed), list(so_far.num_right), so_far.num_steps, begin + 1
    while at < end:
        num_steps += 1
        for place, column in enumerate(hits):
            if at >= end:
                break
            guessed[place] += 1
            if not column[at]:
                break
            right[place] += 1
            at += 1
        at += 1  # the token that the model itself draws
    return Acceptance(guessed, right, num_steps, so_far.num_tokens + min(at, end) - begin - 1)
