"""Draws guesses as the model draws tokens: with the same parameters and, at the same position, with the same noise.

So if a drafter's distribution q is near the model's p, both usually draw the same token: with a probability of at least
(1 - d) / (1 + d), where d is the distance between p and q. Source: Daliri, Musco and Suresh, "Coupling without
communication and drafter-invariant speculative decoding" (2025).
"""

import numpy as np
from torch import Tensor

from penstock.gpu_worker.devices.device import Device
from penstock.gpu_worker.state.row_state import RowState
from penstock.kernels.sampling.sampling import sample
from penstock.parts.drafts.worker.drafter import Int32Array


def draw(logits: Tensor, rows: Int32Array, positions: Int32Array, state: RowState, device: Device) -> Tensor:
    """Draw a token for each row, and write it to its position of the row's tokens.

    Args:
        logits: [S, V]; overwritten.
        rows: int32[S].
        positions: int32[S], where the tokens go; all tokens before them are there.
        state: the rows' parameters and tokens.
        device: the device of the logits.

    Returns:
        int32[S], 0 where no token could be drawn.
    """
    state.limit_tokens(logits, rows, positions)
    if state.native_sampler is not None and state.native_sampler.takes(logits):
        return state.native_sampler.draw(logits, rows, positions).clamp_(min=0)
    its_rows, its_positions = (each.long() for each in device.upload(np.stack((rows, positions))))  # as the model's
    return sample(logits, its_rows, its_positions, state.sampling, state.needs(rows, positions)).clamp_(min=0)
