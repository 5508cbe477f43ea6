"""The kernels of latent attention, both ways, against the float64 references."""

from typing import Any

import pytest
import torch

from penstock.kernels.latents.attention import expanded_attention_reference, latent_attention_reference
from penstock.kernels.latents.choice import Choice, choose_reference
from penstock.kernels.latents.write import latent_write_reference
from penstock.kernels.triton.latents.attention import LatentTiles, latent_attention_triton
from penstock.kernels.triton.latents.choice import choose_triton, keep_index_keys_triton
from penstock.kernels.triton.latents.expanded import ExpandedTiles, expanded_attention_triton
from penstock.kernels.triton.latents.write import latent_write_triton
from tests.kernels.latent_cases import (
    Lens,
    bounds_of,
    chosen_inputs,
    chosen_reference,
    expanded_inputs,
    index_inputs,
    latent_inputs,
    positions_of,
)
from tests.kernels.tolerances import assert_near

DECODES: Lens = ((1, 1), (1, 16), (1, 17), (1, 67))
MIXED: Lens = ((1, 33), (5, 5), (7, 40), (0, 3), (1, 1), (19, 32))


def check_absorbed(
    device: str,
    lens: Lens,
    tiles: LatentTiles | None,
    num_heads: int = 16,
    kv_rank: int = 32,
    rope_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> None:
    inputs = latent_inputs(lens, num_heads, kv_rank, rope_dim, page_size, dtype, device, torch.nan)
    got = latent_attention_triton(*inputs, kv_rank=kv_rank, scale=0.2, tiles=tiles, **bounds_of(lens))
    assert_near(got, latent_attention_reference(*inputs, kv_rank=kv_rank, scale=0.2))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_decode(device: str, page_size: int, num_splits: int) -> None:
    check_absorbed(device, DECODES, LatentTiles(16, 1, 16, num_splits, 4, 1), page_size=page_size)


@pytest.mark.parametrize(("num_heads", "block_h", "block_q"), [(16, 16, 2), (20, 32, 1), (5, 16, 4), (128, 64, 1)])
def test_head_counts(device: str, num_heads: int, block_h: int, block_q: int) -> None:
    tiles = LatentTiles(block_h, block_q, 16, 2, 4, 1)
    check_absorbed(device, ((1, 20), (3, 21)), tiles, num_heads=num_heads)


@pytest.mark.parametrize(("kv_rank", "rope_dim"), [(64, 64), (48, 8), (512, 64)])
def test_sizes(device: str, kv_rank: int, rope_dim: int) -> None:
    tiles = LatentTiles(16, 1, 16, 2, 4, 1)
    check_absorbed(device, ((1, 37), (3, 18)), tiles, kv_rank=kv_rank, rope_dim=rope_dim)


def test_absorbed_dtypes(device: str, dtype: torch.dtype) -> None:
    check_absorbed(device, MIXED, None, page_size=4, dtype=dtype)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_longer_bound_changes_nothing(device: str, splits: int) -> None:
    """A captured graph launches with the bounds it was captured with; padding rows have length 0."""
    inputs = latent_inputs(DECODES, 16, 32, 16, 16, torch.float32, device, torch.nan)
    tiles = LatentTiles(16, 1, 16, splits, 4, 1)
    options: dict[str, Any] = {"kv_rank": 32, "scale": 0.2, "max_query_len": 1, "tiles": tiles}
    exact = latent_attention_triton(*inputs, max_seq_len=67, **options)
    longer = latent_attention_triton(*inputs, max_seq_len=5000, **options)
    torch.testing.assert_close(exact, longer, rtol=0, atol=0)
    none = inputs._replace(seq_lens=torch.zeros_like(inputs.seq_lens))
    assert latent_attention_triton(*none, max_seq_len=67, **options).eq(0).all()


@pytest.mark.parametrize(("nope_dim", "v_dim"), [(32, 32), (24, 40)])
@pytest.mark.parametrize("tiles", [ExpandedTiles(16, 16, 4, 1), ExpandedTiles(32, 16, 4, 1), None])
def test_expanded(device: str, dtype: torch.dtype, nope_dim: int, v_dim: int, tiles: ExpandedTiles | None) -> None:
    inputs = expanded_inputs(MIXED, 3, nope_dim, 16, v_dim, dtype, device)
    got = torch.full((inputs.q.shape[0], 3, v_dim), torch.nan, dtype=dtype, device=device)
    expanded_attention_triton(*inputs, scale=0.2, max_query_len=19, out=got, tiles=tiles)
    assert_near(got, expanded_attention_reference(*inputs, scale=0.2))


@pytest.mark.parametrize(("num_tokens", "by_position"), [(5, True), (5, False), (70, True), (70, None)])
def test_write(device: str, dtype: torch.dtype, num_tokens: int, by_position: bool | None) -> None:
    kv = torch.randn(num_tokens, 40, device=device).to(dtype)
    q = torch.randn(num_tokens, 3, 24, device=device).to(dtype)
    angles, weight = torch.randn(90, 4, device=device), torch.randn(32, device=device).to(dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randperm(90, device=device)[:num_tokens]
    slots = torch.randperm(96, device=device)[:num_tokens]
    slots[1] = -1
    pools = [torch.full((6, 1, 16, 40), 7.0, dtype=dtype, device=device) for _ in range(2)]
    queries = [q.clone(), q.clone()]
    at, table = (positions, cos_sin) if by_position else (None, None if by_position is None else cos_sin[positions])
    latent_write_reference(kv, queries[0], at, table, weight, 1e-6, pools[0], slots)
    latent_write_triton(kv, queries[1], at, table, weight, 1e-6, pools[1], slots)
    assert_near(queries[1], queries[0], factor=2)
    assert_near(pools[1], pools[0], factor=2)


@pytest.mark.parametrize(("num_heads", "dim", "top_k"), [(8, 16, 5), (12, 24, 3), (64, 128, 9), (8, 16, 100)])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_choice(
    monkeypatch: pytest.MonkeyPatch, device: str, page_size: int, num_heads: int, dim: int, top_k: int
) -> None:
    """Also when scores are held of few tokens at once, and with a longer bound, as in a captured graph."""
    inputs = index_inputs(MIXED, num_heads, dim, 40, page_size, torch.float32, device)
    expected = choose_reference(*inputs, top_k=top_k)
    assert positions_of(choose_triton(*inputs, top_k=top_k, max_seq_len=40), inputs) == expected
    monkeypatch.setattr("penstock.kernels.triton.latents.choice.MOST_SCORES", 500)
    q, weights = (torch.cat((each, each[:3])) for each in inputs[:2])
    padded = inputs._replace(q=q, weights=weights)
    longer = choose_triton(*padded, top_k=top_k, max_seq_len=200)
    count = len(expected)
    assert longer.counts[count:].eq(0).all()  # tokens behind all rows choose nothing
    assert positions_of(Choice(longer.slots[:count], longer.counts[:count]), inputs) == expected


def test_chosen_attention(device: str, dtype: torch.dtype) -> None:
    """Each token is a row of its own, and each of its positions a page; more is kept behind a latent and its key."""
    q, pages, choice = chosen_inputs(21, 9, 16, 32, 16, dtype, device)
    starts = torch.arange(22, dtype=torch.int32, device=device)
    bounds: dict[str, Any] = {"max_query_len": 1, "max_seq_len": 9}
    got = latent_attention_triton(q, pages, choice.slots, starts, choice.counts, kv_rank=32, scale=0.2, **bounds)
    assert_near(got, chosen_reference(q, pages, choice, 32, 0.2))


def test_index_keys(device: str, dtype: torch.dtype) -> None:
    k, slots = torch.randn(5, 24, device=device).to(dtype), torch.tensor([7, -1, 30, 0, 95], device=device)
    pages = torch.full((6, 1, 16, 64), 7.0, dtype=dtype, device=device)
    keep_index_keys_triton(k, pages, slots)
    entries = pages.view(-1, 64)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(entries[slot, 40:], k[token])
    assert int((entries == 7.0).sum()) == entries.numel() - 4 * 24
