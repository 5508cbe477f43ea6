"""Rounding to four bits, with a scale and a zero for each group of inputs, chosen for the least error.

The range of codes need not include a group's largest and smallest weight: a slightly narrower range rounds all other
weights more finely. So several ranges are tried. For each range, the best scale and its squared error follow from the
codes in closed form (least squares). The range with the least error is taken. llama.cpp searches the scales of its
4-bit blocks in this way (make_qkx2_quants in ggml-quants.c).

If the inputs' correlations were measured, the matrix is rounded column by column. Columns that are not rounded yet
compensate for the error that a column's rounding adds to the products (GPTQ, Frantar et al. 2022, arXiv:2210.17323,
algorithm 1). Only correlations within a block of inputs are known, so errors are compensated within their block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

INT4_BITS = 4
_LAST = (1 << INT4_BITS) - 1  # the largest code
_MIDDLE = 8  # the code of 0 in groups without a zero of their own
_RANGES = (1.03, 0.98, 0.93, 0.88, 0.83, 0.78, 0.73, 0.68)
"""Fractions of the whole range that are tried; both ends are cut alike."""
_PEAKS = (1.05, 1.02, 0.99, 0.96, 0.93, 0.90, 0.87, 0.84, 0.81, 0.78)
"""Fractions of the largest magnitude that are tried if groups have no zeros. The largest magnitude gets code 0, since
there is one more code below the middle than above it. So scales may be negative."""
_AT_ONCE = 1 << 18
"""Weights that are rounded together, so that intermediate results stay in the processor's cache."""
_OUTPUTS_AT_ONCE = 1 << 13  # with feedback, which goes through the inputs one by one
_LEAST = 1e-20
_DAMPING = 0.01
"""Fraction of the mean diagonal that is added to the diagonal, so that rarely used inputs do not take all errors."""


class Correlation(NamedTuple):
    """The correlations of a matrix's inputs: sums of x x^T within blocks of consecutive inputs."""

    sums: Tensor  # fp32[blocks, B, B]; if the last block extends beyond the inputs, it has zeros there

    @property
    def block(self) -> int:
        """B."""
        return self.sums.shape[-1]


def rounded_in_groups(
    matrix: Tensor, group: int, has_zeros: bool, correlation: Correlation | None
) -> tuple[Tensor, Tensor, Tensor | int]:
    """Codes uint8[..., N, K], scales [..., N, J] of the matrix's dtype, zeros uint8[..., N, J]; J = ceil(K / group).

    Args:
        matrix: [..., N, K].
        group: inputs that share a scale.
        has_zeros: whether each group has a zero of its own.
        correlation: of the inputs, if known; each of its blocks has whole groups.
    """
    num_inputs = matrix.shape[-1]
    num_groups = -(-num_inputs // group)
    rows = matrix.reshape(-1, num_inputs)
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty((rows.shape[0], num_groups), dtype=matrix.dtype, device=matrix.device)
    zeros = torch.empty((rows.shape[0], num_groups), dtype=torch.uint8, device=matrix.device)
    num_rows = max(1, _AT_ONCE // num_inputs) if correlation is None else _OUTPUTS_AT_ONCE
    feedback = None if correlation is None else _feedback(correlation)
    for first in range(0, rows.shape[0], num_rows):
        of = slice(first, first + num_rows)
        part = rows[of].float()
        if feedback is None:
            _round_alone(part, group, has_zeros, codes[of], scales[of], zeros[of])
        else:
            _round_with_feedback(part, group, has_zeros, feedback, codes[of], scales[of], zeros[of])
    shape = (*matrix.shape[:-1], num_groups)
    return codes.view(matrix.shape), scales.view(shape), zeros.view(shape) if has_zeros else _MIDDLE


def _round_alone(part: Tensor, group: int, has_zeros: bool, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
    num_rows, num_inputs = part.shape
    missing = -num_inputs % group
    if missing:  # the last weight is repeated, which changes no range
        part = torch.cat((part, part[:, -1:].expand(-1, missing)), dim=1)
    # Each group is a column, so that all operations run over long rows.
    columns = part.reshape(-1, group).t().contiguous()
    its_scales, its_zeros = _best(columns, has_zeros, scales.dtype)
    rounded = torch.addcmul(its_zeros, columns, its_scales.reciprocal()).round_().clamp_(0, _LAST)
    codes.copy_(rounded.t().reshape(num_rows, -1)[:, :num_inputs])
    scales.copy_(its_scales.view(num_rows, -1))
    zeros.copy_(its_zeros.view(num_rows, -1))


def _best(columns: Tensor, has_zeros: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zeros, fp32[M], of the columns of fp32[group, M]; the scales are numbers of `dtype`."""
    low, high = columns.aminmax(dim=0)
    codes, products = torch.empty_like(columns), torch.empty_like(columns)
    best = torch.full_like(low, -1.0)
    scales, zeros = torch.ones_like(low), torch.zeros_like(low)
    for inverse, zero in _tried(low, high, has_zeros):
        torch.addcmul(zero, columns, inverse, out=codes).round_().clamp_(0, _LAST).sub_(zero)
        crossed = torch.mul(columns, codes, out=products).sum(0)
        squared = torch.mul(codes, codes, out=products).sum(0).clamp_(min=_LEAST)
        gain = crossed.square().div_(squared)  # sum of squares minus squared error
        is_better = gain > best
        best = torch.maximum(best, gain)
        scales = torch.where(is_better, crossed / squared, scales)
        zeros = torch.where(is_better, zero, zeros)
    scales = scales.to(dtype).float()
    return scales.masked_fill_(scales == 0, 1.0), zeros


def _tried(low: Tensor, high: Tensor, has_zeros: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of an inverse scale and a zero for each group, from its smallest and its largest weight."""
    if not has_zeros:
        peak = torch.where(-low > high, low, high)
        inverse = -_MIDDLE / torch.where(peak == 0, 1.0, peak)
        zero = torch.full_like(peak, _MIDDLE)
        yield from ((inverse / share, zero) for share in _PEAKS)
        return
    low, high = low.clamp(max=0), high.clamp(min=0)  # zero itself must be a code
    span = (high - low).clamp_(min=_LEAST)
    for share in _RANGES:
        inverse = (_LAST / share) / span
        begin = low * ((1 + share) / 2) + high * ((1 - share) / 2)
        yield inverse, begin.mul_(inverse).neg_().round_().clamp_(0, _LAST)


def _feedback(correlation: Correlation) -> Tensor:
    """fp32[blocks, B, B], upper triangles: how much later inputs compensate for an earlier one's error."""
    sums = correlation.sums
    diagonal = sums.diagonal(dim1=-2, dim2=-1)
    damping = diagonal.mean(-1, keepdim=True).mul(_DAMPING).clamp(min=_LEAST)
    damped = sums + torch.diag_embed(damping.expand_as(diagonal))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    triangles: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return triangles


def _round_with_feedback(
    part: Tensor,
    group: int,
    has_zeros: bool,
    feedback: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
) -> None:
    block = feedback.shape[-1]
    columns = part.t().contiguous()  # each input is a row, so that operations run over long rows
    rounded = torch.empty_like(columns)
    for number, triangle in enumerate(feedback):
        of_block = columns[number * block : (number + 1) * block]
        for first in range(0, len(of_block), group):
            weights = of_block[first : first + group]
            count = len(weights)
            its_scales, its_zeros = _best(weights, has_zeros, scales.dtype)
            errors = torch.empty_like(weights)
            for i, its in enumerate(weights):
                its_codes = rounded[number * block + first + i]
                torch.addcdiv(its_zeros, its, its_scales, out=its_codes).round_().clamp_(0, _LAST)
                row = triangle[first + i, first + i : first + count]
                errors[i] = (its - its_scales * (its_codes - its_zeros)) / row[0]
                weights[i:].sub_(row[:, None] * errors[i])
            rest = triangle[first : first + count, first + count : len(of_block)]
            of_block[first + count :].sub_(rest.t() @ errors)
            place = (number * block + first) // group
            scales[:, place] = its_scales
            zeros[:, place] = its_zeros
    codes.copy_(rounded.t())
