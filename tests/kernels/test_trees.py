"""Trees on a CPU: attention of their nodes, and moving what they have written."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import KV_FORMATS, PageLayout
from penstock.kernels.attention.move_positions import move_positions, move_positions_reference
from penstock.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from tests.kernels.attention_cases import AttentionCase, make_inputs
from tests.kernels.launched.test_quantized_kv import quantized_pages
from tests.kernels.native.native_library import load_library, native_attention
from tests.kernels.pairs import every
from tests.kernels.tree_cases import as_nodes

LENS = ((1, 150), (1, 3), (9, 41), (1, 33), (1, 64), (1, 129))
DEPTHS = [40, 3, 0, 0, 1, 5]


@pytest.mark.parametrize(
    ("page_size", "window", "extras", "format", "head_dim"),
    every((2, 16, 64), (None, 1, 21, -16), (False, True), ("", "bfloat16", *sorted(KV_FORMATS)), (32, 80)),
)
def test_nodes_find_what_they_find_one_after_the_other(
    page_size: int, window: int | None, extras: bool, format: str, head_dim: int
) -> None:
    """Bit for bit with the native kernels, over blocks of 64 keys; nearly so with torch's."""
    case = AttentionCase(LENS, 4, 2, head_dim, page_size, window=window, softcap=2.0 * extras, sinks=extras)
    inputs = make_inputs(case)
    q, k, v, table, starts, lens = inputs.args
    if format == "bfloat16":
        k, v = k.bfloat16(), v.bfloat16()
    nodes = as_nodes(k, v, table, lens, DEPTHS)
    pages, moved = (k.contiguous(), v.contiguous()), (nodes.k_pages, nodes.v_pages)
    layout = None
    if format in KV_FORMATS:
        layout = PageLayout(KV_FORMATS[format], page_size, head_dim)
        pages = (quantized_pages(k, layout, 4), quantized_pages(v, layout, 4))
        moved = (quantized_pages(nodes.k_pages, layout, 4), quantized_pages(nodes.v_pages, layout, 4))
    options = {**inputs.options, "layout": layout}
    plain = native_attention(load_library(2), q, *pages, table, starts, lens, **options)
    of_nodes = (q, *moved, nodes.page_table, starts, lens)
    assert torch.equal(native_attention(load_library(2), *of_nodes, **options, paths=nodes.paths), plain)
    if format == "bfloat16":
        q = q.bfloat16()
    expected = paged_attention_reference(q, *pages, table, starts, lens, **options)
    assert torch.equal(paged_attention_reference(q, *of_nodes[1:], **options, paths=nodes.paths), expected)
    # torch reads masked keys: they must be numbers.
    finite = [pages if layout is not None else pages.nan_to_num() for pages in moved]
    if layout is not None:
        finite = [_finite(each, layout) for each in moved]
    bounds: dict[str, Any] = {"max_query_len": inputs.max_query_len, "max_seq_len": inputs.max_seq_len}
    table = nodes.page_table.where(nodes.page_table < len(finite[0]), 0)
    got = paged_attention(q, finite[0], finite[1], table, starts, lens, **options, **bounds, paths=nodes.paths)
    tolerance = 2e-2 if format == "bfloat16" else 1e-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def _finite(pages: Tensor, layout: PageLayout) -> Tensor:
    """The same pages without what is no number."""
    pages = pages.clone()
    is_wrong = layout.scales(pages).isnan().any(-1)
    layout.codes(pages)[is_wrong] = 0
    layout.scales(pages)[is_wrong] = 0
    return pages


@pytest.mark.parametrize("format", ["", *sorted(KV_FORMATS)])
def test_moved_positions(format: str) -> None:
    """Targets may be sources of others; what is not moved stays, to the byte."""
    page_size, head_dim, rng = 4, 32, Random(1)
    layout = PageLayout(KV_FORMATS[format], page_size, head_dim) if format else None
    generator = torch.Generator().manual_seed(0)
    if layout is None:
        pages = torch.randn(6, 20, 2, page_size, head_dim, generator=generator)
    else:
        shape = (6, 20, 2, layout.used_bytes + 4)
        pages = torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8)
    table = torch.randperm(20, generator=generator, dtype=torch.int32).view(4, 5)
    moves = [(row, at, 3 + i) for row in (2, 0) for i, at in enumerate(sorted(rng.sample(range(4, 20), 6)))]
    moved = torch.tensor([move for move in moves if move[1] != move[2]], dtype=torch.int32).unbind(1)
    assert set(moved[1].tolist()) & set(moved[2].tolist())
    expected = pages.clone()
    move_positions_reference(expected, layout, table, page_size, *moved)
    assert not torch.equal(pages, expected)
    move_positions(pages, layout, table, page_size, *moved)
    assert torch.equal(pages, expected)
