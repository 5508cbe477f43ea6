"""Sampling the next tokens: penalties, filters and the Gumbel-max draw, vectorised over rows.

Order: logit bias, mask of stop ids below min_tokens, penalties, temperature, min-p, top-k, top-p, draw.
Each filter is a threshold on the tempered logits. A token that ties with the last kept token is kept, too.

If logits have no valid softmax, every path returns one of the negative numbers below instead of a token.
"""

import math

import torch
from torch import Tensor

from penstock.kernels.sampling.philox import philox_reference
from penstock.kernels.sampling.sampling_cpu import sample_cpu
from penstock.kernels.sampling.sampling_state import NOT_FINITE, NOTHING_LEFT, SamplingNeeds, SamplingState

__all__ = ["NOTHING_LEFT", "NOT_FINITE", "SamplingNeeds", "SamplingState", "sample", "sample_reference"]


def sample(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, needs: SamplingNeeds) -> Tensor:
    """Sample one token per row, and write it to its position of `state.token_ids`.

    Args:
        logits: [S, V], any float type; overwritten if fp32.
        rows: int32 or int64 [S], the row of `state` for each.
        positions: int32 or int64 [S], where the sampled token goes; the tokens before it are known.
        state: parameters of all rows.
        needs: what at least one row needs; everything else is skipped for all rows.

    Returns:
        int32 [S]. Among equal logits, the lowest id wins. Randomness follows `philox.py`: it depends on
        (seed, position, token id), never on the batch. Where no token can be sampled, the result is `NOT_FINITE` or
        `NOTHING_LEFT`. The table gets token 0 then, because the next step may read it before the error is known.
    """
    if logits.ndim != 2 or rows.shape != positions.shape or rows.shape[0] != logits.shape[0]:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit rows {tuple(rows.shape)}")
    if logits.is_cuda:
        from penstock.kernels.triton.sampling.sampling import sample_triton

        return sample_triton(logits, rows, positions, state, needs)
    rows, positions = rows.long(), positions.long()
    tokens = sample_cpu(logits, rows, positions, state, needs)
    state.token_ids[rows, positions] = tokens.clamp(min=0)
    return tokens


def sample_reference(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    """Row by row in plain Python; does not change its arguments."""
    drawn = []
    for s, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        drawn.append(_draw(adjusted_logits_reference(logits[s], row, position, state), row, position, state))
    return torch.tensor(drawn, dtype=torch.int32, device=logits.device)


def adjusted_logits_reference(logits: Tensor, row: int, position: int, state: SamplingState) -> list[float]:
    """One row's logits [V] after bias, mask and penalties, before the temperature."""
    z = [float(x) for x in logits.float()]
    for token_id, value in zip(state.bias_ids[row].tolist(), state.bias_values[row].tolist(), strict=True):
        if token_id >= 0:
            z[token_id] += value
    prompt_len = int(state.num_prompt_tokens[row])
    if position - prompt_len < int(state.min_tokens[row]):
        for token_id in state.stop_ids[row].tolist():
            if token_id >= 0:
                z[token_id] = -math.inf
    tokens = state.token_ids[row, :position].tolist()
    repetition = float(state.repetition_penalty[row])
    for token_id in dict.fromkeys(tokens):
        z[token_id] = z[token_id] / repetition if z[token_id] > 0 else z[token_id] * repetition
    for token_id in tokens[prompt_len:]:
        z[token_id] -= float(state.frequency_penalty[row])
    for token_id in dict.fromkeys(tokens[prompt_len:]):
        z[token_id] -= float(state.presence_penalty[row])
    return z


def kept_reference(z: list[float], row: int, state: SamplingState) -> list[int]:
    """The ids that remain of one row's tempered logits after min-p, top-k and top-p."""
    top = max(z)
    min_p = float(state.min_p[row])
    kept = [i for i, x in enumerate(z) if x > -math.inf and (min_p <= 0 or x >= top + math.log(min_p))]
    top_k = int(state.top_k[row])
    if 0 < top_k < len(kept):
        threshold = sorted((z[i] for i in kept), reverse=True)[top_k - 1]
        kept = [i for i in kept if z[i] >= threshold]
    top_p = float(state.top_p[row])
    if top_p < 1:
        total = sum(math.exp(z[i] - top) for i in kept)
        mass = 0.0
        threshold = top
        for x in sorted((z[i] for i in kept), reverse=True):
            if mass >= top_p * total:
                break
            threshold = x
            mass += math.exp(x - top)
        kept = [i for i in kept if z[i] >= threshold]
    return kept


def _draw(z: list[float], row: int, position: int, state: SamplingState) -> int:
    temperature = float(state.temperature[row])
    if any(math.isnan(x) or x == math.inf for x in z):
        return NOT_FINITE
    if max(z) == -math.inf:
        return NOTHING_LEFT
    if temperature <= 0:
        return max(range(len(z)), key=lambda i: (z[i], -i))
    z = [x / temperature for x in z]
    seed = int(state.seed[row])
    best, best_score = 0, -math.inf
    for i in kept_reference(z, row, state):
        u = ((philox_reference(seed, position, i) >> 9) + 0.5) / 2**23
        score = z[i] - math.log(-math.log(u))
        if score > best_score:
            best, best_score = i, score
    return best
