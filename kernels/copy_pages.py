"""Copy whole KV pages: the write half of copy-on-write."""

from torch import Tensor


def copy_pages(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy pages `src[i]` to `dst[i]` in all layers, keys and values.

    Args:
        kv: [num_layers, 2, num_pages, Hk, page_size, D], written.
        src: [C] int32 or int64 page ids.
        dst: [C], distinct, and disjoint from `src`.
    """
    if src.shape != dst.shape or src.ndim != 1 or kv.ndim != 6:
        raise ValueError(f"src {tuple(src.shape)} and dst {tuple(dst.shape)} do not fit pages {tuple(kv.shape)}")
    if kv.is_cuda:
        from penstock.kernels.triton.copy_pages import copy_pages_triton

        copy_pages_triton(kv, src, dst)
        return
    kv.index_copy_(2, dst.long(), kv.index_select(2, src))


def copy_pages_reference(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """One page at a time."""
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        kv[:, :, target] = kv[:, :, source]
