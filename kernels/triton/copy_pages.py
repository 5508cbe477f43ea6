"""Copy whole KV pages in all layers in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import ceil_div


@triton.jit
def copy_pages_kernel(
    blocks_ptr, src_ptr, dst_ptr, page_elements, stride_place, stride_kind, stride_page, BLOCK: tl.constexpr
):
    """Grid (C * chunks of a page, 2, places)."""
    chunks = tl.cdiv(page_elements, BLOCK)
    copy = tl.program_id(0) // chunks
    cols = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    base = blocks_ptr + tl.program_id(2).to(tl.int64) * stride_place + tl.program_id(1) * stride_kind
    src = base + tl.load(src_ptr + copy).to(tl.int64) * stride_page
    dst = base + tl.load(dst_ptr + copy).to(tl.int64) * stride_page
    mask = cols < page_elements
    tl.store(dst + cols, tl.load(src + cols, mask=mask), mask=mask)


def copy_pages_triton(blocks: Tensor, src: Tensor, dst: Tensor) -> None:
    """blocks [places, 2, num_pages, elements], a page's elements contiguous; src, dst [C] page ids."""
    if not src.shape[0]:
        return
    num_places, _, _, elements = blocks.shape
    if blocks.stride(3) != 1:
        raise ValueError(f"pages must be contiguous, got strides {blocks.stride()}")
    block = 2048
    grid = (src.shape[0] * ceil_div(elements, block), 2, num_places)
    strides = blocks.stride()[:3]
    copy_pages_kernel[grid](blocks, src, dst, elements, *strides, BLOCK=block, num_warps=4)
