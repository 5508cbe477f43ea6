"""The CPU path of `top_logprobs`: selects the best few without sorting the whole vocabulary."""

import torch
from torch import Tensor

from penstock.kernels.native.library import Library


def top_logprobs_cpu(
    logits: Tensor, chosen: Tensor, num_top: int, library: Library | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as `penstock.kernels.sampling.top_logprobs.top_logprobs`."""
    z = logits.float().contiguous()
    if library is not None:
        normaliser = library.log_sum_exp(z)
    else:  # row by row: the order in which torch adds up depends on the number of rows
        normaliser = torch.stack([row.logsumexp(-1) for row in z]) if len(z) else z.new_empty(0)
    of_chosen = z.gather(1, chosen.long()[:, None]).squeeze(1) - normaliser
    values, ids = z.topk(num_top, dim=-1)
    if num_top and bool(((z >= values[:, -1:]).sum(-1) > num_top).any()):
        # The last token ties with some that were left out, and topk does not define which of them it takes.
        values, ids = z.sort(dim=-1, descending=True, stable=True)
        values, ids = values[:, :num_top], ids[:, :num_top]
    else:
        # All candidates are included: lowest ids first, then a stable sort by value.
        by_id = ids.argsort(dim=-1)
        values, ids = values.gather(1, by_id), ids.gather(1, by_id)
        values, by_value = values.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, by_value)
    return values - normaliser[:, None], ids.int(), of_chosen
