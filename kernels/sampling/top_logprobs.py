"""Log-probabilities of the most likely tokens and of the sampled one."""

import torch
from torch import Tensor

from penstock.kernels.native.library import Library
from penstock.kernels.sampling.top_logprobs_cpu import top_logprobs_cpu

_COMPILED_FOR = (0, 1, 5, 20)


def top_logprobs(
    logits: Tensor, chosen: Tensor, num_top: int, library: Library | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax of the best `num_top` tokens of each row and of one chosen token, without a full log-softmax copy.

    A row's results have the same bits whatever other rows are beside it.

    Args:
        logits: [S, V], any float type.
        chosen: int32 or int64 [S], a token id per row.
        num_top: 0 <= num_top <= V.
        library: the native CPU kernels, if there are any; on a GPU it is not used.

    Returns:
        (fp32 [S, num_top], highest first; int32 [S, num_top] their ids, of equal logits the lowest id first;
        fp32 [S] of `chosen`).
    """
    if logits.ndim != 2 or chosen.shape != logits.shape[:1] or not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)}, chosen {tuple(chosen.shape)} and num_top {num_top} do not fit")
    if logits.is_cuda:
        from penstock.kernels.triton.sampling.top_logprobs import top_logprobs_triton

        # Each number of best tokens needs a compiled kernel, so a few sizes serve all requests.
        most = min(next((size for size in _COMPILED_FOR if size >= num_top), num_top), logits.shape[1])
        best, best_ids, of_chosen = top_logprobs_triton(logits, chosen, most)
        return best[:, :num_top], best_ids[:, :num_top], of_chosen
    return top_logprobs_cpu(logits, chosen, num_top, library)


def top_logprobs_reference(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The formula in fp32 on the selected values only."""
    z = logits.float()
    normaliser = z.logsumexp(-1)
    # Candidates are sorted stably, because topk does not define which of equal logits comes first.
    ordered, ids = z.sort(dim=-1, descending=True, stable=True)
    of_chosen = z.gather(1, chosen.long()[:, None]).squeeze(1) - normaliser
    return ordered[:, :num_top] - normaliser[:, None], ids[:, :num_top].to(torch.int32), of_chosen


def token_ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """1 + the number of tokens with a higher logit than the chosen one.

    Args:
        logits: [S, V], any float type.
        chosen: int32 or int64 [S], a token id per row.

    Returns:
        int32 [S].
    """
    of_chosen = logits.gather(1, chosen.long()[:, None])
    return 1 + (logits > of_chosen).sum(-1, dtype=torch.int32)
