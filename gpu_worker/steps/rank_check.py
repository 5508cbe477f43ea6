"""Checks that ranks that sample the same rows draw the same tokens (`check_ranks`)."""

from torch import Tensor

from penstock.gpu_worker.parallel.ranks import Ranks


class RanksDisagreeError(RuntimeError):
    """Ranks have drawn different tokens, though their logits should be the same."""


class RankCheck:
    """Compares the tokens of each step. Every rank of the stage has one, and waits for the others."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, tokens: Tensor) -> None:
        """Compare int[S], one token for each row that samples.

        Raises:
            RanksDisagreeError: on all ranks, if any rank has a different token.
        """
        of_all = self._ranks.all_gather(tokens).view(-1, tokens.shape[0])
        differ = (of_all != of_all[0]).any(dim=0)
        if bool(differ.any()):
            row = int(differ.nonzero()[0])
            raise RanksDisagreeError(
                f"the ranks have drawn different tokens: {of_all[:, row].tolist()} for row {row} of "
                f"{tokens.shape[0]} that sample, and for {int(differ.sum())} rows in all"
            )
