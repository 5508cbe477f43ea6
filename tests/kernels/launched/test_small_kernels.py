"""Norms, activations, rotary embedding with the KV write, page copies and the row-state kernels."""

import math
from typing import get_args

import pytest
import torch

from penstock.kernels.activation import ActivationKind, activation_reference, gated_activation_reference
from penstock.kernels.attention.copy_pages import copy_pages_reference
from penstock.kernels.attention.qk_norm_rope_write import qk_norm_rope_write_reference
from penstock.kernels.norms import add_norm_reference, norm_reference
from penstock.kernels.prepare_inputs import prepare_inputs_reference
from penstock.kernels.triton.activation import activation_triton, gated_activation_triton
from penstock.kernels.triton.attention.copy_pages import copy_pages_triton
from penstock.kernels.triton.attention.qk_norm_rope_write import qk_norm_rope_write_triton
from penstock.kernels.triton.norms import add_norm_triton, norm_triton
from penstock.kernels.triton.prepare_inputs import prepare_inputs_triton
from penstock.kernels.triton.row_updates import write_runs_triton
from tests.kernels.norm_cases import NORMS, QK_CASES, QKCase, make_qk_inputs, norm_weights
from tests.kernels.runs import write_runs_reference
from tests.kernels.tolerances import assert_near


@pytest.mark.parametrize(("shape", "kind"), [
    *(((1, 64), kind) for kind in NORMS), ((3, 100), "llama"), ((3, 100), "layer"), ((2, 5, 896), "llama"),
    ((5, 4096), "gemma"), ((2, 4096), "layer"),
])  # fmt: skip
def test_norm(device: str, dtype: torch.dtype, shape: tuple[int, ...], kind: str) -> None:
    x, weights = 3 * torch.randn(shape, device=device, dtype=dtype), norm_weights(kind, shape[-1], dtype, device)
    assert_near(norm_triton(x, weights), norm_reference(x, weights))
    tiny = x * 1e-3
    assert_near(norm_triton(tiny, weights), norm_reference(tiny, weights))


@pytest.mark.parametrize("width", [64, 1000])
@pytest.mark.parametrize(("kind", "scale", "post"), [
    ("llama", 1.0, ""), ("llama", 0.22, ""), ("gemma", 1.0, "gemma"), ("", 1.0, "llama"), ("layer", 0.5, "bare"),
])  # fmt: skip
def test_add_norm(device: str, dtype: torch.dtype, width: int, kind: str, scale: float, post: str) -> None:
    x, residual = torch.randn(2, 7, width, device=device, dtype=dtype)
    fused = (residual.double() + torch.tensor(scale).double().item() * x.double()).float().to(dtype)
    weights, of_x = (norm_weights(name, width, dtype, device) if name else None for name in (kind, post))
    expected, total = add_norm_reference(x, residual, weights, scale, of_x)
    got, updated = add_norm_triton(x, residual, weights, scale, of_x)
    assert updated is residual
    if post:
        assert_near(residual, total)
    else:  # the product may be rounded before it is added, or not
        assert bool(((residual == total) | (residual == fused)).all())
    assert_near(got, expected)


@pytest.mark.parametrize("kind", get_args(ActivationKind))
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 1500), (2, 4864)])
def test_activations(device: str, dtype: torch.dtype, kind: ActivationKind, tokens: int, width: int) -> None:
    x = (4 * torch.randn(tokens, 2 * width, device=device)).to(dtype)
    x[0, :4] = torch.tensor([-50.0, 60.0, 0.0, -1.0])
    factor = 3 if kind.startswith("gelu") else 1
    assert_near(gated_activation_triton(x, kind), gated_activation_reference(x, kind), factor=factor)
    if kind != "clamped_swiglu":
        assert_near(activation_triton(x, kind), activation_reference(x, kind), factor=factor)
    x[:] = math.nan
    assert gated_activation_triton(x, kind).isnan().all()


@pytest.mark.parametrize("case", QK_CASES, ids=repr)
def test_qk_norm_rope_write(device: str, dtype: torch.dtype, case: QKCase) -> None:
    inputs = make_qk_inputs(case._replace(dtype=dtype), True, device, num_tokens=3)
    slots = torch.tensor([5, -1, 23], device=device)
    shape = (2, 6, case.num_kv_heads, 4, case.head_dim)
    pools = [torch.full(shape, 7.0, device=device, dtype=dtype) for _ in range(2)]
    expected = qk_norm_rope_write_reference(*inputs.args, pools[0][0], pools[0][1], slots, inputs.q_scale)
    got = qk_norm_rope_write_triton(*inputs.args, pools[1][0], pools[1][1], slots, inputs.q_scale)
    assert_near(got, expected, factor=2)
    assert_near(pools[1], pools[0], factor=2)
    qkv, positions, cos_sin, norms = inputs.args
    if cos_sin is not None:
        rows = cos_sin[positions]
        again = qk_norm_rope_write_triton(qkv, None, rows, norms, pools[1][0], pools[1][1], slots.int(), inputs.q_scale)
        torch.testing.assert_close(again, got, rtol=0, atol=0)
    q_only, before = qkv[:, : case.num_q_heads * case.head_dim].contiguous(), pools[1].clone()
    alone = qk_norm_rope_write_triton(
        q_only,
        positions,
        cos_sin,
        norms._replace(k=None),
        pools[1][0],
        pools[1][1],
        slots,
        inputs.q_scale,
        writes=False,
    )
    torch.testing.assert_close(alone, got, rtol=0, atol=0)
    torch.testing.assert_close(pools[1], before, rtol=0, atol=0)


def test_rope_of_many_tokens(device: str) -> None:
    """The launcher takes larger blocks from 65 tokens on."""
    inputs = make_qk_inputs(QKCase(num_q_heads=12), False, device, num_tokens=70)
    slots = torch.arange(70, device=device)
    pools = [torch.zeros(2, 18, 2, 4, 16, device=device) for _ in range(2)]
    expected = qk_norm_rope_write_reference(*inputs.args, pools[0][0], pools[0][1], slots)
    got = qk_norm_rope_write_triton(*inputs.args, pools[1][0], pools[1][1], slots)
    assert_near(got, expected)
    assert_near(pools[1], pools[0])


@pytest.mark.parametrize(("heads", "page_size", "head_dim"), [(2, 1, 64), (3, 16, 80), (2, 64, 128)])
def test_copy_pages(device: str, dtype: torch.dtype, heads: int, page_size: int, head_dim: int) -> None:
    blocks = torch.randn(6, 7, heads * page_size * head_dim, device=device).to(dtype)
    expected = blocks.clone()
    src, dst = torch.tensor([[6, 2, 2], [0, 5, 1]], device=device, dtype=torch.int32)
    copy_pages_reference(expected, src, dst)
    copy_pages_triton(blocks, src, dst)
    torch.testing.assert_close(blocks, expected, rtol=0, atol=0)


def test_write_runs(device: str) -> None:
    counts = torch.tensor([1, 0, 1500, 3, 40], dtype=torch.int32, device=device)
    rows = torch.tensor([4, 1, 0, 4, 2], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 5, 17, 1, 1999], dtype=torch.int32, device=device)
    values = torch.arange(1, 1545, dtype=torch.int32, device=device)
    tables = [torch.zeros(6, 2048, dtype=torch.int32, device=device) for _ in range(2)]
    write_runs_reference(tables[0], rows, starts, counts, values)
    write_runs_triton(tables[1], rows, starts, counts, values)
    torch.testing.assert_close(tables[1], tables[0], rtol=0, atol=0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (1, 37, 16, 2), (1300, 1)])
def test_prepare_inputs(device: str, page_size: int, counts: tuple[int, ...]) -> None:
    num_new = torch.tensor(counts, dtype=torch.int32, device=device)
    rows = torch.tensor([5, 0, 3, 7][: len(counts)], dtype=torch.int32, device=device)
    start = torch.tensor([0, 31, 15, 200][: len(counts)], dtype=torch.int32, device=device)
    token_ids = torch.randint(0, 50000, (8, 1400), dtype=torch.int32, device=device)
    table = torch.randint(0, 1000, (8, 1400 // page_size + 1), dtype=torch.int32, device=device)
    args = (rows, start, num_new, sum(counts), token_ids, table, page_size)
    expected = prepare_inputs_reference(*args)
    for got, wanted in zip(prepare_inputs_triton(*args), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
