"""Grouped products of a mixture's experts: each product reads the weights of every used expert once.

Token t and the j-th of its k experts make row t * k + j. `group_rows` sorts the rows by expert, `grouped_linear`
multiplies each row with its expert's matrix, and `sum_of_experts` adds up the rows of each token. There are E experts,
T tokens and R rows. R is T * k; on a CPU, only rows of experts that are held here count (`held_experts.py`).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SortedRows(NamedTuple):
    """Rows for the CPU. Results are stored in the order of the experts."""

    top_k: int
    rows: Tensor  # int64[R], the row at each place
    places: Tensor  # int64[T * k], the place of each row; R: another rank computes it
    experts: tuple[tuple[int, int, int], ...]  # (expert, its first place, the place after its last one), ascending


class BlockedRows(NamedTuple):
    """Rows for a GPU. Results are stored by row number. A block has some rows of one expert."""

    top_k: int
    rows: Tensor  # int32[T * k], by expert
    blocks: Tensor  # int32[3, B]: each block's expert, first place in `rows`, and end; blocks may be empty
    size: int  # the most rows of a block
    experts: Tensor | None = None  # int32[T * k], each row's expert, if other ranks compute some rows
    num_experts: int = 0  # then: experts from this number on are other ranks'


GroupedRows = SortedRows | BlockedRows


def group_rows(ids: Tensor, num_experts: int, *, are_some: bool = False) -> GroupedRows:
    """Sort rows by expert, and then by token. On a GPU the host reads nothing back.

    Args:
        ids: int32 [T, k], each token's experts, all different.
        num_experts: E.
        are_some: an id of E means that another rank computes the row, so nothing is computed for it here.
    """
    if ids.ndim != 2 or ids.dtype != torch.int32:
        raise ValueError(f"ids must be int32 [T, k], got {ids.dtype} {tuple(ids.shape)}")
    if ids.is_cuda:
        from penstock.kernels.triton.experts.experts import group_rows_triton

        return group_rows_triton(ids, num_experts, are_some=are_some)
    flat = ids.flatten()
    rows = flat.argsort(stable=True)
    places = torch.empty_like(rows).scatter_(0, rows, torch.arange(len(rows)))
    experts, begin = [], 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts)[:num_experts].tolist()):
        if count:
            experts.append((expert, begin, begin + count))
            begin += count
    if begin < len(rows):
        rows = rows[:begin]
        places.clamp_(max=begin)
    return SortedRows(ids.shape[1], rows, places, tuple(experts))


def num_inputs(grouped: GroupedRows, *, of_tokens: bool) -> int:
    """How many rows the input of a grouped product has: T if `of_tokens`, else R."""
    if not of_tokens:
        return grouped.rows.shape[0]
    return (grouped.places if isinstance(grouped, SortedRows) else grouped.rows).shape[0] // grouped.top_k


def grouped_linear(
    x: Tensor,
    grouped: GroupedRows,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    of_tokens: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Each row's product with its expert's matrix: x @ weight^T + bias.

    Args:
        x: [R, in], an earlier result; or, if `of_tokens`, [T, in] with one input for all rows of a token.
        grouped: the rows.
        weight: [E, out, in], contiguous.
        bias: [E, out] or None.
        of_tokens: see `x`.
        scales: fp32 [T, k], factors of the inputs; None for none.

    Returns:
        [R, out] in the dtype of `x`, in the order in which `grouped` stores rows. Sums are fp32.
    """
    num_rows = num_inputs(grouped, of_tokens=of_tokens)
    if x.shape != (num_rows, weight.shape[2]) or not weight.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit {num_rows} rows")
    if isinstance(grouped, BlockedRows):
        from penstock.kernels.triton.experts.experts import grouped_linear_triton

        return grouped_linear_triton(x, grouped, weight, bias, of_tokens=of_tokens, scales=scales)
    if of_tokens:
        x = x.index_select(0, grouped.rows // grouped.top_k)
    if scales is not None:
        x = x * scales.flatten()[grouped.rows, None].to(x.dtype)
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, begin, end in grouped.experts:
        matrix = weight[expert].t()
        if bias is None:
            torch.mm(x[begin:end], matrix, out=out[begin:end])
        else:
            torch.addmm(bias[expert], x[begin:end], matrix, out=out[begin:end])
    return out


def sum_of_experts(x: Tensor, grouped: GroupedRows, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows, in the order of its experts.

    Args:
        x: [R, H], a result of `grouped_linear`.
        grouped: the rows.
        weights: fp32 [T, k]; None: all are 1.

    Returns:
        [T, H] in the dtype of `x`. Sums are fp32, over the rows that are computed here.
    """
    if x.ndim != 2 or x.shape[0] != grouped.rows.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} does not fit {grouped.rows.shape[0]} rows")
    if isinstance(grouped, BlockedRows):
        from penstock.kernels.triton.experts.experts import sum_of_experts_triton

        return sum_of_experts_triton(x, grouped, weights)
    places = grouped.places.view(-1, grouped.top_k)
    total = torch.zeros(places.shape[0], x.shape[1])
    for j in range(grouped.top_k):
        if x.shape[0] < places.numel():
            its = (places[:, j] < x.shape[0]).nonzero().squeeze(1)
            part = x.index_select(0, places[its, j]).float()
            total.index_add_(0, its, part if weights is None else part.mul_(weights[its, j, None]))
            continue
        rows = x.index_select(0, places[:, j])
        if weights is None:
            total += rows
        else:
            total.addcmul_(rows, weights[:, j, None])
    return total.to(x.dtype)


def grouped_linear_reference(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The formula in fp32: [T, k, in] -> [T, k, out] in the dtype of `x`."""
    out = torch.einsum("tki,tkoi->tko", x.float(), weight[ids.long()].float())
    return (out if bias is None else out + bias[ids.long()].float()).to(x.dtype)


def sum_of_experts_reference(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """The formula in fp32: [T, k, H] -> [T, H]."""
    return (x.float() if weights is None else x.float() * weights[:, :, None]).sum(1).to(x.dtype)
