"""Which tokens a row must not sample: those outside its list of allowed ones, or the end of a bad word.

Such limits are rare, and differ from row to row, so these rows are handled one by one. This happens entirely on the
device, because a row's last tokens may not have reached the host yet.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.ipc.messages import NewRow, SamplingParams


class _BadWords(NamedTuple):
    """K token sequences. `before` has all but the last token of each, padded in front with -1 to the longest, M."""

    before: Tensor  # int32[K, M]
    num_before: Tensor  # int64[K]
    last: Tensor  # int64[K]


class _Limits(NamedTuple):
    allowed: Tensor | None  # int64[A]
    bad_words: _BadWords | None
    num_prompt_tokens: int


def has_limits(params: SamplingParams) -> bool:
    """Whether there are tokens that a sequence with these parameters must not sample."""
    return bool(params.bad_words or params.allowed_token_ids)


class TokenLimits:
    """The rows that have such limits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.rows: dict[int, _Limits] = {}
        """Usually empty; then there is nothing to free or to apply."""

    def clear(self) -> None:
        """Forget all limits."""
        self.rows.clear()

    def free(self, rows: Iterable[int]) -> None:
        """These rows no longer hold a sequence."""
        if self.rows:
            for row in rows:
                self.rows.pop(row, None)

    def enter(self, new_rows: Iterable[NewRow]) -> None:
        """Record the limits of new sequences."""
        for new in new_rows:
            params = new.sampling
            self.rows.pop(new.row, None)
            if has_limits(params):
                self.rows[new.row] = self._limits(params, new.num_prompt_tokens)

    def apply(self, logits: Tensor, rows: Iterable[int], positions: Iterable[int], token_ids: Tensor) -> None:
        """Set forbidden tokens to minus infinity.

        Args:
            logits: [S, V]; changed in place.
            rows: S rows.
            positions: where the tokens sampled from the logits will be.
            token_ids: int32[R, L], all rows' tokens by position.
        """
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            limits = self.rows.get(row)
            if limits is None:
                continue
            if limits.allowed is not None:
                kept = logits[i, limits.allowed]
                logits[i].fill_(-torch.inf)
                logits[i, limits.allowed] = kept
            if limits.bad_words is not None:
                num_outputs = position - limits.num_prompt_tokens
                _ban(logits[i], limits.bad_words, token_ids[row], position, num_outputs)

    def _limits(self, params: SamplingParams, num_prompt_tokens: int) -> _Limits:
        allowed = None
        if params.allowed_token_ids:
            allowed = self._device.upload(np.array(params.allowed_token_ids, dtype=np.int64))
        bad_words = None
        if params.bad_words:
            upload = self._device.upload
            longest = max(len(word) for word in params.bad_words) - 1
            before = [[-1] * (longest - len(word) + 1) + list(word[:-1]) for word in params.bad_words]
            bad_words = _BadWords(
                upload(np.array(before, dtype=np.int32)),
                upload(np.array([len(word) - 1 for word in params.bad_words], dtype=np.int64)),
                upload(np.array([word[-1] for word in params.bad_words], dtype=np.int64)),
            )
        return _Limits(allowed, bad_words, num_prompt_tokens)


def _ban(logits: Tensor, words: _BadWords, token_ids: Tensor, position: int, num_outputs: int) -> None:
    """Ban the last token of each word if the output ends with the word's other tokens."""
    width = words.before.shape[1]
    known = token_ids[max(0, position - width) : position]
    if known.shape[0] < width:
        known = torch.cat((known.new_full((width - known.shape[0],), -2), known))
    matches = ((known == words.before) | (words.before < 0)).all(dim=1) & (words.num_before <= num_outputs)
    # Added, not assigned, because one token may end several words.
    penalty = torch.zeros_like(words.last, dtype=logits.dtype).masked_fill_(matches, -torch.inf)
    logits.index_put_((words.last,), penalty, accumulate=True)
