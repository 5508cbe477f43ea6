"""Attention without a direction, among the positions of each row of a ragged batch; nothing is kept in pages."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional


class RaggedRows(NamedTuple):
    """N rows, whose T tokens follow each other."""

    lens: npt.NDArray[np.integer]  # int[N], tokens of each row, on the host
    query_start_loc: Tensor  # int32[N + 1], where each row's tokens begin


def ragged_attention(qkv: Tensor, rows: RaggedRows, scale: float, reach: int | None = None) -> Tensor:
    """Scaled dot products of each row's positions with all of its positions.

    Args:
        qkv: [T, 3, H, D], contiguous: queries, keys and values.
        rows: the rows. A CPU is fastest where rows of equal length are neighbours.
        scale: of the scores.
        reach: a position sees so many positions on either side, and itself; None: all of its row.

    Returns:
        [T, H, D].
    """
    if qkv.ndim != 4 or qkv.shape[1] != 3 or not qkv.is_contiguous() or int(rows.lens.sum()) != qkv.shape[0]:
        raise ValueError(f"rows of {int(rows.lens.sum())} tokens do not fit qkv {tuple(qkv.shape)}")
    if qkv.is_cuda:
        from penstock.kernels.triton.attention.ragged_attention import ragged_attention_triton

        return ragged_attention_triton(qkv, rows, scale, reach)
    return ragged_attention_cpu(qkv, rows, scale, reach)


def ragged_attention_cpu(qkv: Tensor, rows: RaggedRows, scale: float, reach: int | None = None) -> Tensor:
    """As `ragged_attention`: one product for each run of rows of equal length, so that nothing is padded."""
    out = qkv.new_empty(qkv.shape[0], *qkv.shape[2:])
    first, lens = 0, rows.lens
    ends = np.flatnonzero(np.diff(lens, append=0)) + 1  # of runs of equal lengths
    begin = 0
    for end in ends.tolist():
        length, count = int(lens[begin]), end - begin
        its = slice(first, first + length * count)
        q, k, v = qkv[its].unflatten(0, (count, length)).transpose(1, 3).unbind(2)  # each [count, H, length, D]
        seen = None if reach is None or length <= reach + 1 else _near(length, reach)
        attended = functional.scaled_dot_product_attention(q, k, v, seen, scale=scale)
        out[its] = attended.transpose(1, 2).flatten(0, 1)
        first, begin = its.stop, end
    return out


def _near(length: int, reach: int) -> Tensor:
    """bool[length, length]: whether two positions are at most `reach` apart."""
    places = torch.arange(length)
    return (places[:, None] - places).abs_() <= reach


def ragged_attention_reference(qkv: Tensor, rows: RaggedRows, scale: float, reach: int | None = None) -> Tensor:
    """The formula in fp32, row by row."""
    out = []
    for row in qkv.float().split(rows.lens.tolist()):
        q, k, v = row.permute(1, 2, 0, 3)  # each [H, length, D]
        scores = scale * q @ k.transpose(1, 2)
        if reach is not None:
            scores = scores.masked_fill(~_near(len(row), reach).to(qkv.device), -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out).to(qkv.dtype)
