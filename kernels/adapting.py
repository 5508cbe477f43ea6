"""What rows add to products on a device that compiles launches: B (A x), with an A and a B of the slot of each row.

A product's outputs are in segments, each with matrices of its own; a slot may lack those of any. Tables on the device
say where the matrices are, so that nothing is read on the host. (On the native CPU kernels: `native/adapting.py`.)
"""

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.experts.experts import BlockedRows


class LowRankTable(NamedTuple):
    """What each slot adds to one product of `segments` outputs, [first, end) each."""

    addresses: (
        Tensor  # int64[slots, segments, 2], of A [rank, inputs] and B^T [rank, outputs], in the dtype of activations
    )
    ranks: Tensor  # int32[slots, segments]; 0: nothing is added
    places: Tensor  # int32[segments, 2]: `segments` on the device
    segments: tuple[tuple[int, int], ...]
    most_rank: int  # of any slot

    @property
    def widest(self) -> int:
        """Outputs of the largest segment."""
        return max(end - first for first, end in self.segments)


def group_by_slot(rows: Tensor, starts: Tensor, slots: Tensor, num_tokens: int, num_slots: int) -> BlockedRows:
    """Group a step's T tokens by slot, without a look at the host.

    Args:
        rows: int32[N], the row of each batch row.
        starts: int32[N + 1]: batch row b has tokens [starts[b], starts[b + 1]).
        slots: int32[R], the slot of each row; negative: none.
        num_tokens: T.
        num_slots: how many there are.
    """
    from penstock.kernels.triton.adapting import group_by_slot_triton

    return group_by_slot_triton(rows, starts, slots, num_tokens, num_slots)


def add_low_rank(x: Tensor, y: Tensor, table: LowRankTable, grouped: BlockedRows) -> Tensor:
    """y [T, outputs], in place, plus what the tokens' slots add to the product of x [T, inputs]. Sums are fp32."""
    from penstock.kernels.triton.adapting import add_low_rank_triton

    if x.shape[0] != y.shape[0] or x.shape[0] != grouped.rows.shape[0] or y.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)} and {grouped.rows.shape[0]} tokens do not fit")
    add_low_rank_triton(x, y, table.addresses, table.ranks, table.places, table.widest, table.most_rank, grouped)
    return y


Matrices = tuple[Tensor, Tensor] | None
"""A [rank, inputs] and B [outputs, rank] of a segment, if a slot has some."""


def add_low_rank_reference(
    x: Tensor, y: Tensor, slots: list[int], segments: tuple[tuple[int, int], ...], matrices: list[list[Matrices]]
) -> Tensor:
    """Token by token, in fp64; `slots`: of each token. `matrices`: by slot and segment."""
    out = y.double()
    for token, slot in enumerate(slots):
        for (first, end), its in zip(segments, matrices[slot] if slot >= 0 else (), strict=False):
            if its is not None:
                a, b = its
                out[token, first:end] += b.double() @ (a.double() @ x[token].double())
    return out.to(y.dtype)
