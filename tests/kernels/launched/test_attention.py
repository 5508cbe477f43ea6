"""Decode and prefill attention kernels against the float64 reference."""

import pytest
import torch

from penstock.kernels.attention.paged_attention import paged_attention_reference
from penstock.kernels.triton.attention.paged_attention import DecodeTiles, PrefillTiles, paged_attention_triton
from tests.kernels.attention_cases import AttentionCase, make_inputs
from tests.kernels.pairs import every
from tests.kernels.tolerances import assert_near

DECODES = ((1, 1), (1, 16), (1, 17), (1, 67))
MIXED = ((1, 33), (5, 5), (7, 40), (1, 1), (19, 32))


def check(
    device: str,
    case: AttentionCase,
    decode: DecodeTiles | None = None,
    prefill: PrefillTiles | None = None,
    last_seen: torch.Tensor | None = None,
) -> None:
    inputs = make_inputs(case, device)
    if last_seen is not None:
        inputs.options["last_seen"] = last_seen.to(device)
    got = torch.full_like(inputs.args[0], float("nan"))
    paged_attention_triton(
        *inputs.args, **inputs.options, max_query_len=inputs.max_query_len, max_seq_len=inputs.max_seq_len, out=got,
        decode=decode, prefill=prefill,
    )  # fmt: skip
    q, k, v, *rest = inputs.args
    expected = paged_attention_reference(q, k, v, *rest, **inputs.options)
    assert_near(got, expected)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode_over_page_sizes(device: str, page_size: int, num_splits: int) -> None:
    check(device, AttentionCase(DECODES, page_size=page_size), decode=DecodeTiles(16, num_splits, 1, 4, 2))


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_prefill_over_page_sizes(device: str, page_size: int) -> None:
    check(device, AttentionCase(MIXED, page_size=page_size), prefill=PrefillTiles(16, 16, 4, 2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (5, 1), (14, 2), (16, 1)])
def test_group_sizes(device: str, heads: int, kv_heads: int) -> None:
    check(
        device,
        AttentionCase(((1, 20), (3, 21)), num_q_heads=heads, num_kv_heads=kv_heads),
        prefill=PrefillTiles(16, 16, 4, 2),
    )


@pytest.mark.parametrize(
    ("head_dim", "page_size", "window", "softcap", "sinks", "num_splits"),
    every(
        (32, 64, 80, 96, 112, 128, 192, 256, 512), (1, 4, 16, 64), (None, 1, 9, 33), (0.0, 2.0), (False, True), (1, 3)
    ),
)
def test_combinations(
    device: str, head_dim: int, page_size: int, window: int | None, softcap: float, sinks: bool, num_splits: int
) -> None:
    """Rows of one query and of several, over tiles of one page and of several, some of which a window hides."""
    case = AttentionCase(
        ((1, 50), (1, 3), (9, 41)), 3, 1, head_dim, page_size, window=window, softcap=softcap, sinks=sinks
    )
    check(device, case, DecodeTiles(16, num_splits, 1, 4, 2), PrefillTiles(16, 16, 4, 2))


@pytest.mark.parametrize("window", [1, 16, 17, -16, -17])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_windows_at_the_edges_of_tiles(device: str, window: int, num_splits: int) -> None:
    """A chunk of several tiles of queries; pages of half a tile."""
    case = AttentionCase(((1, 32), (1, 33), (1, 49), (37, 64)), 2, 2, 32, 8, window=window)
    check(device, case, DecodeTiles(16, num_splits, 1, 4, 2), PrefillTiles(16, 16, 4, 2))


@pytest.mark.parametrize(("page_size", "window", "softcap"), [(4, None, 0.0), (1, 5, 2.0), (32, 17, 0.0)])
def test_positions_of_a_picture_see_each_other(device: str, page_size: int, window: int | None, softcap: float) -> None:
    """Some end in a later tile of queries, and of keys; of two that are neighbours each sees only itself."""
    rows = ((1, 33), (5, 5), (7, 40), (19, 64), (2, 2))
    seen = [torch.arange(length - count, length, dtype=torch.int32) for count, length in rows]
    for row, first, last in ((2, 34, 36), (3, 45, 47), (3, 48, 61), (4, 0, 1)):
        seen[row][(seen[row] >= first) & (seen[row] <= last)] = last
    case = AttentionCase(rows, page_size=page_size, window=window, softcap=softcap)
    check(device, case, prefill=PrefillTiles(16, 16, 4, 2), last_seen=torch.cat(seen))


def test_dtypes(device: str, dtype: torch.dtype) -> None:
    check(device, AttentionCase(MIXED, dtype=dtype))
    check(device, AttentionCase(MIXED, dtype=dtype, head_dim=128, window=9, softcap=5.0, sinks=True))


def test_rules_of_the_launcher(device: str) -> None:
    check(device, AttentionCase(((1, 300), (1, 700)), page_size=64))
    check(device, AttentionCase(((40, 150),), num_q_heads=8, dtype=torch.float16))


def test_a_longer_bound_changes_nothing(device: str) -> None:
    """A captured graph launches with the bounds it was captured with."""
    inputs = make_inputs(AttentionCase(DECODES), device)
    exact, longer = (
        paged_attention_triton(*inputs.args, **inputs.options, max_query_len=1, max_seq_len=bound)
        for bound in (67, 5000)
    )
    torch.testing.assert_close(exact, longer)


def test_a_row_without_context_gives_zeros(device: str) -> None:
    """Padding rows of a captured batch have length 0."""
    inputs = make_inputs(AttentionCase(((1, 20), (1, 20))), device)
    seq_lens = torch.tensor([20, 0], dtype=torch.int32, device=device)
    for tiles in (DecodeTiles(16, 1, 1, 4, 2), DecodeTiles(16, 4, 1, 4, 2)):
        got = paged_attention_triton(
            *inputs.args[:5], seq_lens, **inputs.options, max_query_len=1, max_seq_len=20, decode=tiles
        )
        assert got[1].eq(0).all()
        assert got[0].isfinite().all()
