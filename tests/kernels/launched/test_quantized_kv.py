"""Quantized pages: what the kernel that writes them stores, bit for bit, and attention that reads them."""

import pytest
import torch

from penstock.kernels.attention.kv_quantization import KV_FORMATS, KVScales, PageLayout, quantize, write_quantized
from penstock.kernels.attention.paged_attention import paged_attention_reference
from penstock.kernels.attention.qk_norm_rope_write import QKNorms, slot_cells
from penstock.kernels.triton.attention import paged_attention
from penstock.kernels.triton.attention.paged_attention import DecodeTiles, PrefillTiles, paged_attention_triton
from penstock.kernels.triton.attention.qk_norm_rope_write import qk_norm_rope_write_triton
from penstock.kernels.triton.device import DeviceFacts
from tests.faults.soak import IS_SOAK
from tests.kernels.attention_cases import AttentionCase, make_inputs
from tests.kernels.norm_cases import QK_CASES, QKCase, make_qk_inputs
from tests.kernels.pairs import every
from tests.kernels.tolerances import assert_near

FORMATS = sorted(KV_FORMATS)
PAGE_SIZE = 4
SPECIAL = (0.0, -0.0, 1e-30, -1e-8, 6e-5, 1.0, 447.9, -448.0, 464.0, 65504.0, -1e30)


def quantized_pages(pages: torch.Tensor, layout: PageLayout, unused: int) -> torch.Tensor:
    """Pages [P, Hk, page_size, D] as bytes; a position with a NaN, and what is unused, would spoil any sum."""
    its = quantize(pages, layout.format)
    stored = torch.full((*pages.shape[:2], layout.used_bytes + unused), 255, dtype=torch.uint8, device=pages.device)
    written = ~pages.isnan().any(-1)
    layout.codes(stored)[written] = its.codes[written]
    layout.scales(stored)[written] = its.scales[written]
    return stored


def check(
    device: str,
    case: AttentionCase,
    name: str,
    decode: DecodeTiles | None = None,
    prefill: PrefillTiles | None = None,
    size: float = 1.0,
    unused: int = 0,
) -> None:
    """Values of fp32 are exact but for the order of sums. In fp16 and bf16 a number of a tile is rounded once.

    That is once more than in tiles of plain numbers, and as much: hence the factor of 2.
    """
    inputs = make_inputs(case, device)
    q, k, v, table, starts, lens = inputs.args
    layout = PageLayout(KV_FORMATS[name], case.page_size, case.head_dim)
    k, v = quantized_pages(k, layout, unused), quantized_pages(v * size, layout, unused)
    got = torch.full_like(q, float("nan"))
    paged_attention_triton(
        q, k, v, table, starts, lens, **inputs.options,
        max_query_len=inputs.max_query_len, max_seq_len=inputs.max_seq_len,
        out=got, layout=layout, decode=decode, prefill=prefill,
    )  # fmt: skip
    expected = paged_attention_reference(q, k, v, table, starts, lens, **inputs.options, layout=layout)
    assert_near(got / size, expected / size, factor=1 if case.dtype == torch.float32 else 2)


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for i, case in enumerate(QK_CASES) for name in (FORMATS if IS_SOAK else [FORMATS[i % 4]])],
    ids=repr,
)
def test_written_bits_are_those_of_the_reference(device: str, dtype: torch.dtype, case: QKCase, name: str) -> None:
    """Of the numbers that the same kernel writes to plain pages.

    The reference is computed on the CPU. On a GPU, torch divides by a number of Python by multiplying with its inverse,
    which gives another scale now and then.
    """
    inputs = make_qk_inputs(case._replace(dtype=dtype), True, device, num_tokens=3)
    slots = torch.tensor([5, -1, 23], device=device)
    plain = torch.zeros(2, 6, case.num_kv_heads, PAGE_SIZE, case.head_dim, device=device, dtype=dtype)
    q = qk_norm_rope_write_triton(*inputs.args, plain[0], plain[1], slots, inputs.q_scale)
    layout = PageLayout(KV_FORMATS[name], PAGE_SIZE, case.head_dim)
    cells = slot_cells(slots[slots >= 0].cpu(), case.num_kv_heads, PAGE_SIZE)
    shape = (2, 6, case.num_kv_heads, layout.used_bytes + 4)
    for scales in (None, KVScales(0.013, 0.4)):
        expected = torch.full(shape, 7, dtype=torch.uint8)
        got = expected.to(device, copy=True)
        for i, pages in enumerate(expected):
            written = plain[i].cpu().view(-1, case.head_dim)[cells]
            write_quantized(pages, layout, cells, written, None if scales is None else scales[i])
        again = qk_norm_rope_write_triton(
            *inputs.args, got[0], got[1], slots, inputs.q_scale, layout=layout, kv_scales=scales
        )
        assert torch.equal(got.cpu(), expected)
        assert torch.equal(again, q)


@pytest.mark.parametrize("num_tokens", [3, 70])
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(1, 80, 80), (2, 32, 8), (2, 96, 48), (8, 64, 16)])
@pytest.mark.parametrize("spans_all", [False, True])
def test_few_heads_of_odd_sizes(
    device: str, heads: int, head_dim: int, rotary_dim: int, spans_all: bool, name: str, num_tokens: int
) -> None:
    """Fewer numbers than threads, and rows than warps: their parts are put together all the same."""
    norm = "llama" if spans_all else ""
    case = QKCase(heads, heads, head_dim, rotary_dim, q_norm=norm, k_norm=norm, spans_all=spans_all)
    inputs = make_qk_inputs(case, False, device, num_tokens)
    layout = PageLayout(KV_FORMATS[name], PAGE_SIZE, head_dim)
    slots = torch.arange(num_tokens, device=device)
    num_pages = -(-num_tokens // PAGE_SIZE)
    plain = torch.zeros(2, num_pages, heads, PAGE_SIZE, head_dim, device=device)
    qk_norm_rope_write_triton(*inputs.args, plain[0], plain[1], slots)
    got = torch.zeros(2, num_pages, heads, layout.used_bytes, dtype=torch.uint8, device=device)
    qk_norm_rope_write_triton(*inputs.args, got[0], got[1], slots, layout=layout)
    cells = slot_cells(slots.cpu(), heads, PAGE_SIZE)
    for pages, its in zip(got.cpu(), plain.cpu(), strict=True):
        expected = torch.zeros_like(pages)
        write_quantized(expected, layout, cells, its.view(-1, head_dim)[cells])
        assert torch.equal(pages, expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("static", [None, 2.0**-9])
def test_numbers_of_every_size(device: str, name: str, static: float | None) -> None:
    """Halves between codes, subnormals, numbers that no scale of fp16 fits, and whole heads of zeros."""
    tokens, heads, dim = 8, 16, 64
    x = torch.randn(tokens, heads, dim, device=device)
    x *= 2.0 ** torch.randint(-30, 16, (tokens, heads, 1), device=device)
    x[1::3] = torch.arange(x[1::3].numel(), device=device).view(x[1::3].shape) % 4096 / 16.0 - 100.0
    x[0, :, : len(SPECIAL)] = torch.tensor(SPECIAL, device=device)
    x[2, 3] = 0.0
    layout = PageLayout(KV_FORMATS[name], PAGE_SIZE, dim)
    pages = torch.zeros(2, 2, heads, layout.used_bytes, dtype=torch.uint8, device=device)
    expected = torch.zeros_like(pages[0], device="cpu")
    slots = torch.randperm(tokens, device=device)
    qkv = torch.cat((torch.zeros(tokens, dim, device=device), x.flatten(1), x.flatten(1)), 1)
    scales = None if static is None else KVScales(static, static)
    qk_norm_rope_write_triton(qkv, None, None, QKNorms(), pages[0], pages[1], slots, layout=layout, kv_scales=scales)
    write_quantized(expected, layout, slot_cells(slots.cpu(), heads, PAGE_SIZE), x.cpu().view(-1, dim), static)
    assert torch.equal(pages[0].cpu(), expected)
    assert torch.equal(pages[1].cpu(), expected)


@pytest.mark.parametrize(
    ("name", "head_dim", "page_size", "window", "softcap", "sinks", "num_splits"),
    every(tuple(FORMATS), (32, 64, 80, 128, 192), (1, 4, 16, 64), (None, 1, 9, 33), (0.0, 2.0), (False, True), (1, 3)),
)
def test_attention(
    device: str,
    name: str,
    head_dim: int,
    page_size: int,
    window: int | None,
    softcap: float,
    sinks: bool,
    num_splits: int,
) -> None:
    """Rows of one query and of several, over tiles of one page and of several, some of which a window hides."""
    case = AttentionCase(
        ((1, 50), (1, 3), (9, 41)), 3, 1, head_dim, page_size, window=window, softcap=softcap, sinks=sinks
    )
    check(device, case, name, DecodeTiles(16, num_splits, 1, 4, 2), PrefillTiles(16, 16, 4, 2))


@pytest.mark.parametrize("name", FORMATS)
def test_dtypes_and_sizes(device: str, dtype: torch.dtype, name: str) -> None:
    """Values that are small leave no bits of fp16 to their weights. Pages may have more bytes than a layer fills."""
    lens = ((1, 33), (5, 5), (7, 40), (1, 1))
    for size in (1.0, 1e-4):
        check(device, AttentionCase(lens, dtype=dtype, page_size=8), name, size=size, unused=8)
    check(device, AttentionCase(lens, 6, 2, 128, dtype=dtype, softcap=5.0, sinks=True), name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exponent", [-100, 0, 100])
def test_queries_of_bf16_beyond_fp16(device: str, name: str, exponent: int) -> None:
    """Rows of any size, and of zeros; the scale brings their scores back."""
    case = AttentionCase(((1, 33), (7, 40)), dtype=torch.bfloat16)
    inputs = make_inputs(case, device)
    q, k, v, table, starts, lens = inputs.args
    q = q.clamp(-1.0, 1.0) * 2.0**exponent
    q[1] = 0.0
    inputs.options["scale"] *= 2.0**-exponent
    layout = PageLayout(KV_FORMATS[name], case.page_size, case.head_dim)
    pages = quantized_pages(k, layout, 0), quantized_pages(v, layout, 0)
    got = paged_attention_triton(
        q, *pages, table, starts, lens, **inputs.options, max_query_len=7, max_seq_len=40, layout=layout
    )
    expected = paged_attention_reference(q, *pages, table, starts, lens, **inputs.options, layout=layout)
    assert_near(got, expected, factor=2)


@pytest.mark.parametrize("name", FORMATS)
def test_values_whose_sizes_differ(device: str, dtype: torch.dtype, name: str) -> None:
    """A token of tiny values does not take the room that the others need, nor does a token of huge ones."""
    case = AttentionCase(((1, 40), (9, 41)), dtype=dtype)
    inputs = make_inputs(case, device)
    q, k, v, table, starts, lens = inputs.args
    sizes = torch.logspace(-4, 3, v.shape[2], device=device).to(dtype)
    v = v * sizes[:, None]
    layout = PageLayout(KV_FORMATS[name], case.page_size, case.head_dim)
    pages = quantized_pages(k, layout, 0), quantized_pages(v, layout, 0)
    got = paged_attention_triton(
        q, *pages, table, starts, lens, **inputs.options, max_query_len=9, max_seq_len=41, layout=layout
    )
    expected = paged_attention_reference(q, *pages, table, starts, lens, **inputs.options, layout=layout)
    size = expected.abs().amax()
    assert_near(got / size, expected / size, factor=1 if dtype == torch.float32 else 2)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_fp8_with_and_without_its_conversion(
    device: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each code of fp8_e4m3 is the same number on a GPU that has no conversion of it."""
    if device == "cuda" and torch.cuda.get_device_capability() < capability:
        pytest.skip("this GPU has no conversion")
    monkeypatch.setattr(paged_attention, "device_facts", lambda _: DeviceFacts(108, capability))
    case = AttentionCase(((1, 1), (3, 3)), 2, 2, 256, 16)
    inputs = make_inputs(case, device)
    q, _, _, table, starts, lens = inputs.args
    layout = PageLayout(KV_FORMATS["fp8_e4m3"], case.page_size, case.head_dim)
    pages = torch.zeros(inputs.args[1].shape[0], 2, layout.used_bytes, dtype=torch.uint8, device=device)
    codes = torch.arange(256, device=device).to(torch.uint8)
    layout.codes(pages)[:] = torch.where(codes & 0x7F == 0x7F, 0, codes)  # which is NaN, and never written
    layout.scales(pages)[:] = 2.0**-4
    got = paged_attention_triton(
        q * 0, pages, pages, table, starts, lens, **inputs.options, max_query_len=3, max_seq_len=3, layout=layout
    )
    expected = paged_attention_reference(q * 0, pages, pages, table, starts, lens, **inputs.options, layout=layout)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
