"""Quantized pages through torch: written as the reference writes them, read as if they held plain numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import paged_attention_cpu
from penstock.kernels.attention.kv_quantization import KV_FORMATS, KVScales, PageLayout, read_quantized, write_quantized
from penstock.kernels.attention.paged_attention import paged_attention, paged_attention_reference
from penstock.kernels.attention.qk_norm_rope_write import qk_norm_rope_write, qk_norm_rope_write_reference
from tests.kernels.norm_cases import QK_CASES, QKCase, make_qk_inputs
from tests.kernels.pairs import every

FORMATS = sorted(KV_FORMATS)


def quantized(pages: Tensor, layout: PageLayout, unused: int = 0) -> Tensor:
    """Plain pages [P, Hk, page_size, D] as quantized ones; what is unused is NaN in any format."""
    num_pages, num_heads = pages.shape[:2]
    made = torch.full((num_pages, num_heads, layout.used_bytes + unused), 0x7F, dtype=torch.uint8)
    write_quantized(made, layout, torch.arange(pages[..., 0].numel()), pages.reshape(-1, layout.head_dim))
    return made


@pytest.mark.parametrize(
    ("name", "case", "has_scales", "dtype"),
    every(tuple(FORMATS), tuple(QK_CASES), (False, True), (torch.float32, torch.bfloat16)),
)
def test_write(name: str, case: QKCase, has_scales: bool, dtype: torch.dtype) -> None:
    """Codes may differ by one step where the rotation rounds otherwise; whoever is not written stays as it was."""
    case = case._replace(dtype=dtype)
    inputs = make_qk_inputs(case, True)
    layout = PageLayout(KV_FORMATS[name], 4, case.head_dim)
    slots = torch.tensor([5, -1, 0, 22, -1, 11])
    scales = KVScales(0.03, 0.04) if has_scales else None
    pages = [torch.zeros(6, case.num_kv_heads, layout.used_bytes + 4, dtype=torch.uint8) for _ in range(4)]
    options: dict[str, Any] = {"layout": layout, "kv_scales": scales}
    expected = qk_norm_rope_write_reference(*inputs.args, pages[0], pages[1], slots, inputs.q_scale, **options)
    qkv = inputs.args[0].clone()
    q = qk_norm_rope_write(qkv, *inputs.args[1:], pages[2], pages[3], slots, inputs.q_scale, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(q, expected, rtol=tolerance, atol=tolerance)
    step = {"int8": 1 / 127, "int4": 1 / 15, "fp8_e4m3": 1 / 8, "fp8_e5m2": 1 / 4}[name]
    for written, reference in ((pages[2], pages[0]), (pages[3], pages[1])):
        read, wanted = read_quantized(written, layout), read_quantized(reference, layout)
        bound = step * 2 * wanted.abs().amax(-1, keepdim=True) + tolerance
        assert ((read - wanted).abs() <= bound).all()
        assert (read - wanted).abs().double().mean() <= tolerance
        kept = torch.zeros(24, dtype=torch.bool)
        kept[slots[slots >= 0]] = True
        kept = kept.view(6, 1, 4).expand(6, case.num_kv_heads, 4)
        assert not layout.codes(written)[~kept].any()
        assert not written[..., layout.used_bytes :].any()


@pytest.mark.parametrize(
    ("name", "head_dim", "page_size", "window", "softcap", "has_sinks", "dtype"),
    every(tuple(FORMATS), (32, 80, 128, 40), (1, 16), (None, 9, 33, -33), (0.0, 5.0), (False, True),
          (torch.float32, torch.bfloat16)),
)  # fmt: skip
@pytest.mark.parametrize("in_pieces", [False, True])
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    in_pieces: bool,
    name: str,
    head_dim: int,
    page_size: int,
    window: int | None,
    softcap: float,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    if in_pieces:
        for limit in ("CONTEXT_PIECE", "QUERY_PIECE", "GATHER_TOKENS"):
            monkeypatch.setattr(paged_attention_cpu, limit, 24)
    torch.manual_seed(0)
    query_lens, seq_lens = [1, 1, 9, 20, 1], torch.tensor([50, 3, 41, 70, 64], dtype=torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    width = -(-70 // page_size)
    table = torch.randperm(5 * width, dtype=torch.int32).view(5, width)
    q = torch.randn(sum(query_lens), 6, head_dim).to(dtype)
    layout = PageLayout(KV_FORMATS[name], page_size, head_dim)
    k, v = (quantized(torch.randn(5 * width, 2, page_size, head_dim), layout, 4) for _ in range(2))
    options: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap, "layout": layout}
    options["sinks"] = torch.randn(6) if has_sinks else None
    expected = paged_attention_reference(q, k, v, table, starts, seq_lens, **options)
    found = paged_attention(q, k, v, table, starts, seq_lens, max_query_len=20, max_seq_len=70, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_shapes_that_do_not_fit_are_refused() -> None:
    layout = PageLayout(KV_FORMATS["int8"], 4, 16)
    pages = torch.zeros(2, 1, layout.used_bytes, dtype=torch.uint8)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    for q, given in ((torch.zeros(1, 1, 8), pages), (torch.zeros(1, 1, 16), pages[:, None])):
        with pytest.raises(ValueError, match="does not fit pages"):
            paged_attention(
                q, given, given, starts[None], starts, lens, scale=1, max_query_len=1, max_seq_len=1, layout=layout
            )
