"""Copy whole KV pages in all layers in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import ceil_div


@triton.jit
def copy_pages_kernel(
    kv_ptr, src_ptr, dst_ptr, page_elements, stride_layer, stride_kind, stride_page, BLOCK: tl.constexpr
):
    """Grid (C * chunks of a page, 2, num_layers)."""
    chunks = tl.cdiv(page_elements, BLOCK)
    copy = tl.program_id(0) // chunks
    cols = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    base = kv_ptr + tl.program_id(2).to(tl.int64) * stride_layer + tl.program_id(1) * stride_kind
    src = base + tl.load(src_ptr + copy).to(tl.int64) * stride_page
    dst = base + tl.load(dst_ptr + copy).to(tl.int64) * stride_page
    mask = cols < page_elements
    tl.store(dst + cols, tl.load(src + cols, mask=mask), mask=mask)


def copy_pages_triton(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """kv [num_layers, 2, num_pages, Hk, page_size, D], each page contiguous; src, dst [C] page ids."""
    if not src.shape[0]:
        return
    num_layers, _, _, num_heads, page_size, head_dim = kv.shape
    elements = num_heads * page_size * head_dim
    if not kv[0, 0, 0].is_contiguous():
        raise ValueError(f"pages must be contiguous, got strides {kv.stride()}")
    block = 2048
    grid = (src.shape[0] * ceil_div(elements, block), 2, num_layers)
    copy_pages_kernel[grid](kv, src, dst, elements, kv.stride(0), kv.stride(1), kv.stride(2), BLOCK=block, num_warps=4)
