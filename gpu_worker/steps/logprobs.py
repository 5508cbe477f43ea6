"""Log-probabilities of sampled tokens and of prompt tokens, sent to the host in one buffer with the tokens."""

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.row_state import RowState
from penstock.gpu_worker.steps.host_step import HostBatch, TokenScores
from penstock.kernels.native.library import Library
from penstock.kernels.sampling.top_logprobs import token_ranks, top_logprobs

_LOGITS_BYTES = 64 << 20
"""Limit for fp32 logits of prompt positions held at once: a long chunk over a large vocabulary would take GiB."""


def score(logits: Tensor, token_ids: Tensor, num_best: int, library: Library | None) -> TokenScores:
    """Score one token in each row of logits.

    Args:
        logits: [K, V] as the model returned them, any float type.
        token_ids: int32 or int64 [K].
        num_best: how many of the most likely tokens to include, at most V.
        library: the native CPU kernels, if there are any.
    """
    best, best_ids, own = top_logprobs(logits, token_ids, num_best, library)
    return TokenScores(
        torch.cat((token_ids.int()[:, None], best_ids), dim=1),
        torch.cat((own[:, None], best), dim=1),
        token_ranks(logits, token_ids),
    )


def prompt_scores(
    model: Model, hidden: Tensor, batch: HostBatch, state: RowState, device: Device
) -> TokenScores | None:
    """Score the prompt tokens after this step's positions, for the rows that ask for it; None if there are none.

    Args:
        model: its head computes the logits.
        hidden: [T, H], the hidden states of all the step's tokens.
        batch: the step.
        state: the rows' tokens and requests.
        device: where `hidden` is.
    """
    num_best = state.prompt_logprobs[batch.rows]
    last = np.minimum(batch.start + batch.num_new, state.num_prompt_tokens[batch.rows] - 1)
    counts = np.where(num_best >= 0, np.maximum(last - batch.start, 0), 0)
    num_tokens = int(counts.sum())
    if not num_tokens:
        return None
    # 0, 1, 2, ... within each row
    within = np.arange(num_tokens) - np.repeat(counts.cumsum() - counts, counts)
    indices = np.repeat(batch.num_new.cumsum() - batch.num_new, counts) + within
    rows, positions = np.repeat(batch.rows, counts), np.repeat(batch.start, counts) + within + 1
    packed = device.upload(np.stack((indices, rows, positions)).astype(np.int64))
    following = state.token_ids[packed[1], packed[2]]
    most = int(num_best[counts > 0].max())
    size = max(1, _LOGITS_BYTES // (4 * model.config.vocab_size))
    library = device.library
    parts = [
        score(model.logits(hidden.index_select(0, packed[0, i : i + size])), following[i : i + size], most, library)
        for i in range(0, num_tokens, size)
    ]
    return TokenScores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
