"""How far a model's predictions are from those of the float model, over every token of some texts."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.bench.quality.texts import Text

Predict = Callable[[list[int]], Tensor]
"""From token ids to fp32[T - 1, V], the logits of what follows each but the last."""
_CACHE_BYTES = 2 << 30


class Quality(NamedTuple):
    """Over all tokens but the first of each text. What has no answers is all answer."""

    num_tokens: int
    top1: float  # share of tokens where the most likely one is the float model's
    kl: float  # mean Kullback-Leibler divergence from the float model's distribution, in nats
    kl_99: float  # what 99 % of the divergences are below
    num_answer_tokens: int
    answer_top1: float
    perplexity: float  # of answers


class Reference:
    """The float model's predictions. They are kept as far as memory allows, and computed again otherwise."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._kept: dict[int, Tensor] = {}
        self._left = _CACHE_BYTES

    def of(self, number: int, text: Text) -> Tensor:
        """fp32[T - 1, V], log-probabilities."""
        if number in self._kept:
            return self._kept[number]
        found = self._predict(text.token_ids).log_softmax(-1)
        if found.nbytes <= self._left:
            self._left -= found.nbytes
            self._kept[number] = found
        return found


@torch.inference_mode()
def measure(reference: Reference, predict: Predict, texts: Iterable[Text]) -> Quality:
    """Compare a model with the reference."""
    agreed, divergences, losses, answers = [], [], [], []
    for number, text in enumerate(texts):
        expected, found = reference.of(number, text), predict(text.token_ids).log_softmax(-1)
        agreed.append((expected.argmax(-1) == found.argmax(-1)).numpy())
        divergences.append((expected.exp() * (expected - found)).sum(-1).double().numpy())
        following = torch.tensor(text.token_ids[1:])
        losses.append(-found.gather(1, following[:, None])[:, 0].double().numpy())
        answers.append(text.is_answer)
    agree, kl, loss, is_answer = (np.concatenate(each) for each in (agreed, divergences, losses, answers))
    return Quality(
        num_tokens=len(agree),
        top1=float(agree.mean()),
        kl=float(kl.mean()),
        kl_99=float(np.quantile(kl, 0.99)),
        num_answer_tokens=int(is_answer.sum()),
        answer_top1=float(agree[is_answer].mean()),
        perplexity=math.exp(loss[is_answer].mean()),
    )
