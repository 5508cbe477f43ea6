"""Move the keys and values of single positions, in all layers of a page group."""

import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import PageLayout


def move_positions(
    pages: Tensor,
    layout: PageLayout | None,
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    sources: Tensor,
    targets: Tensor,
) -> None:
    """Copy the content of positions `sources[i]` of rows to positions `targets[i]` of the same rows.

    All positions are read before any is written, so a target may be the source of another copy. Codes and scales of
    quantized pages move as they are.

    Args:
        pages: [parts, num_pages, Hk, page_size, D], with a layout uint8[parts, num_pages, Hk, head bytes]; written.
        layout: of quantized pages.
        page_table: int32[R, max_pages].
        page_size: tokens per page.
        rows: int32[M].
        sources: int32[M].
        targets: int32[M]; no two are the same position of a row.
    """
    rows, sources, targets = rows.long(), sources.long(), targets.long()
    from_pages, to_pages = (page_table[rows, at // page_size].long() for at in (sources, targets))
    parts = (pages,) if layout is None else (layout.codes(pages), layout.scales(pages))
    for part in parts:  # [parts, num_pages, Hk, page_size, .]
        its = part[:, from_pages, :, sources % page_size]
        part[:, to_pages, :, targets % page_size] = its


def move_positions_reference(
    pages: Tensor,
    layout: PageLayout | None,
    page_table: Tensor,
    page_size: int,
    rows: Tensor,
    sources: Tensor,
    targets: Tensor,
) -> None:
    """Position by position, from a copy of all pages."""
    before = pages.clone()
    pairs = [(pages, before)]
    if layout is not None:
        pairs = [(layout.codes(pages), layout.codes(before)), (layout.scales(pages), layout.scales(before))]
    for row, source, target in torch.stack((rows, sources, targets), 1).tolist():
        from_page, to_page = int(page_table[row, source // page_size]), int(page_table[row, target // page_size])
        for new, old in pairs:
            new[:, to_page, :, target % page_size] = old[:, from_page, :, source % page_size]
