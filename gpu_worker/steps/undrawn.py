"""Rows for which sampling found no token: marked by a negative number in the token's place."""

import numpy as np

from penstock.ipc.messages import RowError
from penstock.kernels.sampling_state import NOT_FINITE, NOTHING_LEFT

_REASONS = {
    NOT_FINITE: "the model's logits are not finite numbers: its weights are damaged, or --dtype is too narrow for it",
    NOTHING_LEFT: "all of the model's logits are minus infinity, possibly because of the request's limits on tokens",
}


def drawn_tokens(token_ids: bytes) -> tuple[bytes, tuple[RowError, ...]]:
    """Separate a step's tokens from the codes in place of missing ones.

    Args:
        token_ids: int32[S], of the sampling rows, as `kernels.sampling.sample` returns them.

    Returns:
        (int32[S], with 0 where there is no token; an error for each such row).
    """
    tokens = np.frombuffer(token_ids, dtype=np.int32)
    if not tokens.shape[0] or tokens.min() >= 0:
        return token_ids, ()
    errors = [RowError(i, _REASONS[int(tokens[i])], "invalid_logits") for i in np.flatnonzero(tokens < 0).tolist()]
    return tokens.clip(min=0).tobytes(), tuple(errors)
