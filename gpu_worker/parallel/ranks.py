"""The operations of a rank together with the other ranks of its group."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.config.ranks import Place


class Ranks(Protocol):
    """One rank's view of its group. Every rank of a stage must make the same calls in the same order.

    A call may block until the others make it. It raises if another rank is gone or the group cannot go on.
    """

    @property
    def place(self) -> Place:
        """This rank's place."""

    # --- within the stage -----------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the tensor ranks, in place; every rank gets the same bits."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] of each tensor rank, of equal shapes -> [..., num_tensor * n], in the order of ranks."""

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Give each tensor rank its rows.

        Args:
            x: [sum(sent), ...], first the rows for tensor rank 0.
            sent: how many rows each tensor rank gets.
            received: how many rows each tensor rank sends.

        Returns:
            [sum(received), ...], first the rows from tensor rank 0.
        """

    # --- between stages -------------------------------------------------------------------------

    def send(self, x: Tensor, stage: int) -> None:
        """Send to the rank with the same tensor number in that stage; `x` may change as soon as this returns."""

    def receive(self, x: Tensor, stage: int) -> Tensor:
        """Fill `x` with what the rank with the same tensor number in that stage sends next."""

    def close(self) -> bool:
        """Leave the group. Idempotent. Captured graphs with calls of it must be gone by then.

        Returns:
            False if that takes too long, because others are gone or do not answer: then a thread of this process is
            stuck in it for good, and only `os._exit` ends the process.
        """
