"""Copy whole KV pages: the write half of copy-on-write."""

from torch import Tensor


def copy_pages(blocks: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy pages `src[i]` to `dst[i]` in all layers, keys and values.

    Args:
        blocks: [parts, num_pages, elements], written.
        src: [C] int32 or int64 page ids.
        dst: [C], distinct, and disjoint from `src`.
    """
    if src.shape != dst.shape or src.ndim != 1 or blocks.ndim != 3:
        raise ValueError(f"src {tuple(src.shape)} and dst {tuple(dst.shape)} do not fit pages {tuple(blocks.shape)}")
    if blocks.is_cuda:
        from penstock.kernels.triton.attention.copy_pages import copy_pages_triton

        copy_pages_triton(blocks, src, dst)
        return
    blocks.index_copy_(1, dst.long(), blocks.index_select(1, src))


def copy_pages_reference(blocks: Tensor, src: Tensor, dst: Tensor) -> None:
    """One page at a time."""
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        blocks[:, target] = blocks[:, source]
