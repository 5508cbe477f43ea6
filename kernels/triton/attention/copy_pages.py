"""Copy whole KV pages in all layers in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.device import ceil_div


@triton.jit
def copy_pages_kernel(blocks_ptr, src_ptr, dst_ptr, page_elements, stride_part, stride_page, BLOCK: tl.constexpr):
    """Grid (C * chunks of a page, parts)."""
    chunks = tl.cdiv(page_elements, BLOCK)
    copy = tl.program_id(0) // chunks
    cols = (tl.program_id(0) % chunks) * BLOCK + tl.arange(0, BLOCK)
    base = blocks_ptr + tl.program_id(1).to(tl.int64) * stride_part
    src = base + tl.load(src_ptr + copy).to(tl.int64) * stride_page
    dst = base + tl.load(dst_ptr + copy).to(tl.int64) * stride_page
    mask = cols < page_elements
    tl.store(dst + cols, tl.load(src + cols, mask=mask), mask=mask)


def copy_pages_triton(blocks: Tensor, src: Tensor, dst: Tensor) -> None:
    """blocks [parts, num_pages, elements], a page's elements contiguous; src, dst [C] page ids."""
    if not src.shape[0]:
        return
    num_parts, _, elements = blocks.shape
    if blocks.stride(2) != 1:
        raise ValueError(f"pages must be contiguous, got strides {blocks.stride()}")
    block = 2048
    grid = (src.shape[0] * ceil_div(elements, block), num_parts)
    copy_pages_kernel[grid](blocks, src, dst, elements, *blocks.stride()[:2], BLOCK=block, num_warps=4)
