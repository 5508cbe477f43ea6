"""The CPU path of sampling, with torch. Noise is computed only for tokens that can still win."""

import math

import torch
from torch import Tensor

from penstock.kernels.sampling.philox import gumbel_from_words, philox_words
from penstock.kernels.sampling.sampling_state import NOT_FINITE, NOTHING_LEFT, SamplingNeeds, SamplingState

# Gumbel noise from 23-bit u lies in [-2.82, 16.64]: a token this far below the best one cannot win.
_NOISE_RANGE = 20.0
_FIRST_SORTED = 1024  # top-p looks at this many of the best tokens before it sorts a whole row
_DENSE_ELEMENTS = 1 << 16  # elements of noise computed at once


def sample_cpu(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, needs: SamplingNeeds) -> Tensor:
    """Arguments and result as in `sampling.sample`; rows and positions are int64. Nothing is written."""
    if needs.nothing:
        return _best(logits)
    z = logits.float()
    if needs.bias:
        _add_bias(z, rows, state)
    if needs.min_tokens:
        _mask_stop_ids(z, rows, positions, state)
    if needs.penalties:
        _penalise(z, rows, positions, state)
    if not needs.random:
        return _best(z)
    temperature = state.temperature[rows]
    is_random = (temperature > 0).nonzero().squeeze(1)
    everything = is_random.shape[0] == rows.shape[0]
    if not everything:
        greedy = _best(z)
        z, rows, positions, temperature = z[is_random], rows[is_random], positions[is_random], temperature[is_random]
    z.div_(temperature[:, None])
    top = z.amax(-1, keepdim=True)
    thresholds = _thresholds(z, top, rows, state, needs)
    drawn = _unless_broken(_gumbel_argmax(z, thresholds, state.seed[rows], positions), top)
    if everything:
        return drawn
    return greedy.index_copy_(0, is_random, drawn)


def _best(z: Tensor) -> Tensor:
    """int32 [S]: the argmax; NaN wins."""
    tokens = z.argmax(-1, keepdim=True)
    return _unless_broken(tokens.squeeze(1), z.gather(1, tokens))


def _unless_broken(tokens: Tensor, top: Tensor) -> Tensor:
    """int32 [S]: tokens [S], or codes where the row's maximum in `top` [S, 1] (NaN if any is) is not finite."""
    values = top.tolist()
    if not all(math.isfinite(value) for (value,) in values):
        failures = [NOTHING_LEFT if value == -math.inf else NOT_FINITE for (value,) in values]
        tokens = torch.where(top.isfinite().squeeze(1), tokens, torch.tensor(failures))
    return tokens.int()


def _add_bias(z: Tensor, rows: Tensor, state: SamplingState) -> None:
    ids = state.bias_ids[rows].long()
    z.scatter_add_(1, ids.clamp(min=0), state.bias_values[rows].masked_fill(ids < 0, 0.0))


def _mask_stop_ids(z: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> None:
    ids = state.stop_ids[rows].long()
    too_early = positions - state.num_prompt_tokens[rows] < state.min_tokens[rows]
    s, k = (too_early[:, None] & (ids >= 0)).nonzero(as_tuple=True)
    z[s, ids[s, k]] = -torch.inf


def _penalise(z: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> None:
    repetition = state.repetition_penalty[rows]
    presence, frequency = state.presence_penalty[rows], state.frequency_penalty[rows]
    wanted = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero().squeeze(1)
    if wanted.shape[0] == 0:
        return
    repetition, presence, frequency = repetition[wanted, None], presence[wanted, None], frequency[wanted, None]
    rows, positions = rows[wanted], positions[wanted, None]
    num_known = int(positions.max())
    ids = state.token_ids[:, :num_known].index_select(0, rows).long()
    at = torch.arange(num_known)
    known = at < positions
    is_output = (known & (at >= state.num_prompt_tokens[rows, None])).float()
    # Column V takes the entries past a row's last token.
    ids = ids.masked_fill(~known, z.shape[1])
    shape = (wanted.shape[0], z.shape[1] + 1)
    seen = torch.zeros(shape, dtype=torch.bool).scatter_(1, ids, True)[:, :-1]
    counts = torch.zeros(shape).scatter_add_(1, ids, is_output)[:, :-1]
    x = z[wanted]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= counts * frequency + (counts > 0) * presence
    z[wanted] = x


def _thresholds(z: Tensor, top: Tensor, rows: Tensor, state: SamplingState, needs: SamplingNeeds) -> Tensor:
    """fp32 [S, 1]: the lowest tempered logit that may be sampled; `top` is the largest."""
    threshold = top - _NOISE_RANGE
    filtered = torch.full_like(top, -torch.inf)
    if needs.min_p:
        filtered = top + state.min_p[rows, None].log()
    if needs.top_k or needs.top_p:
        filtered = torch.maximum(filtered, _top_k_top_p(z, top, filtered, rows, state, needs))
    return torch.maximum(threshold, filtered)


def _top_k_top_p(
    z: Tensor, top: Tensor, floor: Tensor, rows: Tensor, state: SamplingState, needs: SamplingNeeds
) -> Tensor:
    """fp32 [S, 1]; `floor` is the threshold of min-p."""
    vocab = z.shape[1]
    k = state.top_k[rows]
    k = torch.where(k > 0, k, vocab).clamp_(max=vocab)[:, None]
    p = state.top_p[rows, None] if needs.top_p else torch.ones_like(top)
    has_p = p < 1
    limited = k[k < vocab]
    num_sorted = int(limited.max()) if limited.numel() else 1
    if needs.top_p:
        num_sorted = max(num_sorted, _FIRST_SORTED)
    num_sorted = min(num_sorted, vocab)
    while True:
        best = z.topk(num_sorted, dim=-1).values
        # The k-th best; no cut where k exceeds what was sorted, since such rows have top-k off.
        kth = torch.where(k < vocab, best.gather(1, (k - 1).clamp(max=num_sorted - 1)), -torch.inf)
        kth = torch.maximum(kth, floor)
        if not needs.top_p:
            return kth
        weights = (best - top).exp().masked_fill_(best < kth, 0.0)
        # The mass for top-p. For rows with top-k, all of it is in `best`; for others it is that of the whole row.
        tied = (z - top).exp_().masked_fill_(z < kth, 0.0).sum(-1, keepdim=True)
        before = weights.cumsum(-1) - weights
        kept = (before < p * tied) & (weights > 0)
        if num_sorted == vocab or not bool((kept[:, -1:] & has_p).any()):
            break
        num_sorted = vocab  # the best tokens do not hold enough mass for some row, so sort everything
    last = (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    return torch.where(has_p, torch.maximum(kth, best.gather(1, last)), kth)


def _gumbel_argmax(z: Tensor, threshold: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 [S]: argmax over the tokens at or above the threshold of tempered logit plus noise."""
    num_rows, vocab = z.shape
    candidates = z >= threshold
    s, ids = candidates.nonzero(as_tuple=True)
    if s.shape[0] * 4 > z.numel():
        return _dense_gumbel_argmax(z.masked_fill(~candidates, -torch.inf), seeds, positions)
    words = philox_words(seeds[s], positions[s], ids >> 2)
    noise = gumbel_from_words(words.gather(1, (ids & 3)[:, None]).squeeze(1))
    scores = torch.full((num_rows, vocab), -torch.inf)
    scores[s, ids] = z[s, ids] + noise
    return scores.argmax(-1)


def _dense_gumbel_argmax(z: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    num_rows, vocab = z.shape
    groups = torch.arange((vocab + 3) // 4)
    step = max(1, _DENSE_ELEMENTS // groups.shape[0])
    for begin in range(0, num_rows, step):
        part = slice(begin, begin + step)
        words = philox_words(seeds[part, None], positions[part, None], groups)
        z[part] += gumbel_from_words(words).flatten(1)[:, :vocab]
    return z.argmax(-1)
