"""Attention of nodes of trees: they find what rows find whose keys are where their positions say."""

from functools import partial
from typing import Any

import pytest
import torch

from penstock.kernels.attention.kv_quantization import KV_FORMATS, PageLayout
from penstock.kernels.attention.paged_attention import paged_attention_reference
from penstock.kernels.triton.attention.paged_attention import DecodeTiles, PrefillTiles, paged_attention_triton
from tests.kernels.attention_cases import AttentionCase, make_inputs
from tests.kernels.launched.test_quantized_kv import quantized_pages
from tests.kernels.pairs import every
from tests.kernels.tolerances import assert_near
from tests.kernels.tree_cases import as_nodes

LENS = ((1, 40), (1, 3), (5, 21), (1, 16))
DEPTHS = [5, 3, 0, 1]


@pytest.mark.parametrize(
    ("page_size", "window", "extras", "num_splits", "format"),
    every((1, 4, 16, 64), (None, 1, 9, -16), (False, True), (1, 3), ("", *sorted(KV_FORMATS))),
)
def test_nodes(device: str, page_size: int, window: int | None, extras: bool, num_splits: int, format: str) -> None:
    """Among rows that are none; in trees that begin before a window, and in it."""
    if format and page_size == 1:
        page_size = 2
    case = AttentionCase(LENS, 3, 1, 32, page_size, window=window, softcap=2.0 * extras, sinks=extras)
    inputs = make_inputs(case, device)
    q, k, v, table, starts, lens = inputs.args
    nodes = as_nodes(k, v, table, lens, DEPTHS)
    layout = PageLayout(KV_FORMATS[format], page_size, 32) if format else None
    pages, moved = (k, v), (nodes.k_pages, nodes.v_pages)
    if layout is not None:
        pages = (quantized_pages(k, layout, 4), quantized_pages(v, layout, 4))
        moved = (quantized_pages(nodes.k_pages, layout, 4), quantized_pages(nodes.v_pages, layout, 4))
    options = {**inputs.options, "layout": layout}
    expected = paged_attention_reference(q, *pages, table, starts, lens, **options)
    of_nodes = (*moved, nodes.page_table, starts, lens)
    torch.testing.assert_close(paged_attention_reference(q, *of_nodes, **options, paths=nodes.paths), expected)
    launch: Any = partial(
        paged_attention_triton, q, max_query_len=inputs.max_query_len, max_seq_len=inputs.max_seq_len,
        decode=DecodeTiles(16, num_splits, 1, 4, 2), prefill=PrefillTiles(16, 16, 4, 2),
    )  # fmt: skip
    got = launch(*of_nodes, **options, paths=nodes.paths)
    assert_near(got, expected)
    plain = launch(*pages, table, starts, lens, **options)
    torch.testing.assert_close(got, plain)
