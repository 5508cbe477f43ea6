"""Rows of attention problems as nodes of trees: their last keys and values are at places of their own."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.paged_attention_cpu import NO_PATH


class Nodes(NamedTuple):
    """Where everything is then."""

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    paths: Tensor


def as_nodes(
    k_pages: Tensor, v_pages: Tensor, page_table: Tensor, seq_lens: Tensor, depths: list[int], *, seed: int = 0
) -> Nodes:
    """Move the last `depths[b]` positions of a row to random, ascending places from where they begin on.

    The places are in new pages, too, and what is at others from there on is NaN.

    Args:
        k_pages: [num_pages, Hk, page_size, D].
        v_pages: the same shape.
        page_table: int32[N, max_pages].
        seq_lens: int32[N].
        depths: of each row; 0: it is no node.
        seed: of the places.
    """
    generator = torch.Generator().manual_seed(seed)
    page_size, device = k_pages.shape[2], k_pages.device
    rooms = [3 * depth + 4 for depth in depths]
    width = max(-(-(int(seq_lens[b]) + room) // page_size) for b, room in enumerate(rooms))
    table = torch.full((len(depths), width), 10**6, dtype=torch.int32, device=device)
    new = [torch.full((width * len(depths), *each.shape[1:]), torch.nan).to(each) for each in (k_pages, v_pages)]
    keys, values = torch.cat((k_pages, new[0])), torch.cat((v_pages, new[1]))
    paths = torch.zeros(len(depths), 1 + max(depths), dtype=torch.int32, device=device)
    paths[:, 0] = NO_PATH
    used = len(k_pages)
    for b, depth in enumerate(depths):
        seq_len = int(seq_lens[b])
        count = -(-seq_len // page_size)
        table[b, :count] = page_table[b, :count]
        if not depth:
            continue
        first = seq_len - depth
        places = first + torch.randperm(rooms[b], generator=generator)[:depth].sort().values
        ids = torch.arange(used, used + width - first // page_size)
        used += len(ids)
        before = table[b].clone()
        # All from the page on in which the tree begins are new; what is before it in this page comes with it.
        table[b, first // page_size :] = ids.to(table)
        paths[b, : 1 + depth] = torch.tensor([first, *places.tolist()])
        for position in range(first - first % page_size, seq_len):
            page = int(before[position // page_size])
            if page >= len(k_pages):
                continue  # behind the window
            place = position if position < first else int(places[position - first])
            to = int(table[b, place // page_size])
            for pages in (keys, values):
                pages[to, :, place % page_size] = pages[page, :, position % page_size]
    return Nodes(keys, values, table, paths)
