"""Latent attention with torch's kernels: against float64, both ways against each other, and their choice."""

import pytest
import torch

from penstock.kernels.attention import paged_attention_cpu
from penstock.kernels.latents import attention as kernels
from penstock.kernels.latents import choice as choices
from penstock.kernels.latents.attention import (
    chosen_latent_attention,
    expanded_attention,
    expanded_attention_reference,
    expanding_pays,
    latent_attention,
    latent_attention_reference,
)
from penstock.kernels.latents.choice import choose, choose_reference, keep_index_keys
from penstock.kernels.latents.write import latent_write, latent_write_reference
from tests.kernels.latent_cases import (
    Lens,
    bounds_of,
    chosen_inputs,
    chosen_reference,
    expanded_inputs,
    index_inputs,
    latent_inputs,
    positions_of,
    starts_of,
)
from tests.kernels.tolerances import assert_near

DTYPES = (torch.float32, torch.bfloat16)
LENS: list[Lens] = [
    ((1, 1),),
    ((1, 40), (1, 17), (1, 200), (1, 16)),
    ((5, 5), (1, 33), (7, 40), (0, 9), (19, 32)),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed(lens: Lens, page_size: int, dtype: torch.dtype) -> None:
    inputs = latent_inputs(lens, 6, 32, 8, page_size, dtype)
    got = latent_attention(*inputs, kv_rank=32, scale=0.1, **bounds_of(lens))
    assert_near(got, latent_attention_reference(*inputs, kv_rank=32, scale=0.1))


def test_absorbed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts are cut; here short ones are, as finely."""
    monkeypatch.setattr(kernels, "SCORES", 700)
    monkeypatch.setattr(paged_attention_cpu, "GATHER_TOKENS", 64)
    inputs = latent_inputs(((1, 40), (1, 39), (1, 70), (20, 90)), 3, 16, 4, 8, torch.float32)
    got = latent_attention(*inputs, kv_rank=16, scale=0.1, max_query_len=20, max_seq_len=90)
    assert_near(got, latent_attention_reference(*inputs, kv_rank=16, scale=0.1))


@pytest.mark.parametrize(("nope_dim", "v_dim"), [(16, 16), (24, 8), (8, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded(nope_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    inputs = expanded_inputs(LENS[2], 3, nope_dim, 8, v_dim, dtype)
    got = torch.full((inputs.q.shape[0], 3, v_dim), torch.nan, dtype=dtype)
    expanded_attention(*inputs, scale=0.3, max_query_len=19, out=got)
    assert_near(got, expanded_attention_reference(*inputs, scale=0.3))


@pytest.mark.parametrize("lens", LENS)
def test_both_ways_give_the_same(lens: Lens) -> None:
    """A head's keys and values are W_UK c and W_UV c of a latent c: q^T (W_UK c) = (W_UK^T q)^T c."""
    heads, rank, nope, rope, v_dim = 3, 32, 16, 8, 12
    latent = latent_inputs(lens, heads, rank, rope, 16, torch.float32)
    contexts = [
        latent.pages[table[: -(-keys // 16)].long(), 0].flatten(0, 1)[:keys]
        for table, (_, keys) in zip(latent.page_table, lens, strict=True)
    ]
    entries = torch.cat(contexts)
    w = torch.randn(heads, nope + v_dim, rank) / 6
    q = torch.randn(latent.q.shape[0], heads, nope + rope)
    bounds = bounds_of(lens)

    absorbed = torch.cat((torch.einsum("thd,hdr->thr", q[..., :nope], w[:, :nope]), q[..., nope:]), dim=2)
    means = latent_attention(absorbed, *latent[1:], kv_rank=rank, scale=0.2, **bounds)
    one = torch.einsum("thr,hdr->thd", means, w[:, nope:])

    kv = torch.einsum("sr,hdr->shd", entries[:, :rank], w)
    other = torch.empty_like(one)
    key_starts = starts_of([keys for _, keys in lens])
    expanded_attention(
        q,
        kv,
        entries[:, rank:],
        latent.query_start_loc,
        key_starts,
        scale=0.2,
        max_query_len=bounds["max_query_len"],
        out=other,
    )
    assert_near(one, other, factor=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_position", [True, False, None])
def test_write(dtype: torch.dtype, by_position: bool | None) -> None:
    kv, q = torch.randn(5, 40).to(dtype), torch.randn(5, 3, 24).to(dtype)
    angles, weight = torch.randn(30, 4), torch.randn(32).to(dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([3, 29, 0, 7, 8]), torch.tensor([9, 0, -1, 47, 16])
    pools = [torch.full((3, 1, 16, 40), 7.0, dtype=dtype) for _ in range(2)]
    queries = [q.clone(), q.clone()]
    at, table = (positions, cos_sin) if by_position else (None, None if by_position is None else cos_sin[positions])
    latent_write_reference(kv, queries[0], at, table, weight, 1e-6, pools[0], slots)
    latent_write(kv, queries[1], at, table, weight, 1e-6, pools[1], slots)
    assert_near(queries[1], queries[0])
    assert_near(pools[1], pools[0])
    assert (pools[1].flatten(0, 2) == 7).all(1).sum() == 3 * 16 - 4


def test_which_way_pays() -> None:
    """With DeepSeek's sizes: decode and short chunks of long contexts are absorbed, prompts expanded."""
    sizes = (512, 64, 128, 128)
    assert not expanding_pays(1, 1, *sizes)
    assert not expanding_pays(1, 32768, *sizes)
    assert not expanding_pays(64, 32768, *sizes)
    assert expanding_pays(16, 16, *sizes)
    assert expanding_pays(512, 32768, *sizes)
    assert expanding_pays(2048, 2048, *sizes)


def test_wrong_shapes_are_refused() -> None:
    inputs = latent_inputs(LENS[0], 2, 32, 8, 16, torch.float32)
    bounds = bounds_of(LENS[0])
    with pytest.raises(ValueError, match="does not fit pages"):
        latent_attention(inputs.q, inputs.pages[..., :8], *inputs[2:], kv_rank=32, scale=1.0, **bounds)
    with pytest.raises(ValueError, match="a latent of 40"):
        latent_attention(*inputs, kv_rank=40, scale=1.0, **bounds)
    others = expanded_inputs(LENS[0], 2, 16, 8, 16, torch.float32)
    with pytest.raises(ValueError, match="does not fit keys"):
        expanded_attention(others.q[:, :1], *others[1:], scale=1.0, max_query_len=1, out=others.q)
    with pytest.raises(ValueError, match="does not fit pages"):
        latent_write(
            torch.zeros(1, 44), others.q, None, torch.zeros(1, 8), torch.ones(32), 1e-6, inputs.pages, torch.zeros(1)
        )


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(("page_size", "top_k", "most"), [(1, 5, 1 << 24), (16, 30, 700), (16, 1000, 1 << 24)])
def test_choice(monkeypatch: pytest.MonkeyPatch, lens: Lens, page_size: int, top_k: int, most: int) -> None:
    """Also when scores are held of few tokens at once, and where tokens see no more than they may choose."""
    monkeypatch.setattr(choices, "SCORES", most)
    inputs = index_inputs(lens, 12, 24, 40, page_size, torch.float32)
    choice = choose(*inputs, top_k=top_k, max_seq_len=200)
    assert positions_of(choice, inputs) == choose_reference(*inputs, top_k=top_k)


@pytest.mark.parametrize("most", [1, 1 << 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_attention(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, most: int) -> None:
    monkeypatch.setattr(kernels, "SCORES", most)
    q, pages, choice = chosen_inputs(21, 9, 6, 32, 8, dtype)
    got = chosen_latent_attention(q, pages, choice, kv_rank=32, scale=0.2)
    assert_near(got, chosen_reference(q, pages, choice, 32, 0.2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_keys_are_kept_behind_the_rest(dtype: torch.dtype) -> None:
    k, slots = torch.randn(5, 24).to(dtype), torch.tensor([7, -1, 30, 0, 95])
    pages = torch.full((6, 1, 16, 64), 7.0, dtype=dtype)
    keep_index_keys(k, pages, slots)
    entries = pages.view(-1, 64)
    assert torch.equal(entries[slots[slots >= 0], 40:], k[slots >= 0])
    assert int((entries == 7.0).sum()) == entries.numel() - 4 * 24
