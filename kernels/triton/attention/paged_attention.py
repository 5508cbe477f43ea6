"""Launch rules of the paged attention kernels: which kernel, which tiles, how many splits."""

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import PageLayout
from penstock.kernels.triton.attention.decode import combine_kernel, decode_kernel
from penstock.kernels.triton.attention.kv_tiles import block_of_head, format_of
from penstock.kernels.triton.attention.prefill import prefill_kernel
from penstock.kernels.triton.device import DeviceFacts, ceil_div, device_facts, next_power_of_two


class DecodeTiles(NamedTuple):
    """Tiles and splits of a decode launch; each split gets at least `min_tiles` KV tiles."""

    block_n: int
    num_splits: int
    min_tiles: int
    num_warps: int
    num_stages: int


class PrefillTiles(NamedTuple):
    """Tiles of a prefill launch; `num_programs` share a multiprocessor's registers."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int = 1


MAX_SPLITS = 128


def decode_tiles(
    facts: DeviceFacts,
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    max_seq_len: int,
    itemsize: int,
    group: int = 1,
    is_quantized: bool = False,
) -> DecodeTiles:
    """Tiles for `num_rows` single-query rows of up to `max_seq_len` tokens.

    A tile of K is 16 KiB. With num_stages 5, K and V have two tiles in flight each, since the page ids that address
    them take every other stage. That is 64 to 72 KiB per program, so three programs fit on a large GPU's multiprocessor
    and two on an Ampere one. With num_stages 3, which leaves one tile in flight, a program over quantized pages takes
    as much, since the numbers of a tile are in shared memory beside its codes. More than 32 query heads for a KV head
    need the registers of twice the warps, and their memory.
    None of these constants has been tuned on a GPU yet; `bench/kernels/sweep.py` does that.
    """
    row_bytes = next_power_of_two(head_dim) * (1 if is_quantized and itemsize == 2 else itemsize)
    is_wide = group > 32
    block_n = max(16, min(32 if is_wide and is_quantized else 128, 16384 // row_bytes))
    num_splits = choose_splits(
        num_rows * num_kv_heads, facts.num_sms * (3 if facts.is_large else 2), ceil_div(max_seq_len, block_n)
    )
    return DecodeTiles(block_n, num_splits, 1, 8 if is_wide else 4, 3 if is_wide or is_quantized else 5)


@functools.lru_cache(maxsize=4096)
def choose_splits(num_programs: int, slots: int, num_tiles: int) -> int:
    """Splits per row for `num_programs` unsplit programs of `num_tiles` KV tiles on a GPU that runs `slots` at once.

    FlashAttention-3's rule (hopper/heuristics.h): the smallest count with a nearly full last wave.
    """
    if num_programs >= 4 * slots:
        return 1
    most = max(1, min(MAX_SPLITS, num_tiles))
    if num_programs * most <= slots:
        return most
    full = [num_programs * splits / slots for splits in range(1, most + 1)]
    efficiency = [waves / math.ceil(waves) for waves in full]
    best = max(efficiency)
    splits = next(i + 1 for i, value in enumerate(efficiency) if value >= 0.85 * best)
    return ceil_div(num_tiles, ceil_div(num_tiles, splits))  # drops splits that would be left without tiles


def prefill_tiles(
    facts: DeviceFacts, head_dim: int, itemsize: int, group: int, softcap: bool, is_quantized: bool = False
) -> PrefillTiles:
    """Tiles for rows with several queries: 64 rows or more, so that large GPUs use their warpgroup products.

    Over quantized pages two programs of 64 rows share a multiprocessor, so that one's softmax runs beside the other's
    products. Over plain pages an H100 computed 8,192 tokens as quickly with two programs of 32 columns as with one of
    64 (442 and 441 TFLOP/s). With 32 columns and three stages a prompt of 1,024 tokens took a fifth longer than with
    64, and 16 prompts of 512 a fifth less. As in FlashAttention-2's Triton version otherwise.
    """
    least = next_power_of_two(group)  # a program computes all queries that share a key
    if itemsize == 4:  # exact fp32 products run on the plain cores: for tests and parity, not for speed
        return PrefillTiles(max(16, least), 16, 4, 2)
    if head_dim > 256:
        return PrefillTiles(max(32, least), 16, 8, 2)
    if head_dim > 128:
        if is_quantized and facts.is_large:  # widening codes needs registers
            return PrefillTiles(max(128, least), 16, 8, 2)
        if is_quantized:
            return PrefillTiles(max(32, least), 32, 8, 2)
        return PrefillTiles(max(128 if facts.is_large else 64, least), 32, 8, 3)
    if facts.is_large:
        if is_quantized and not softcap and least <= 64:  # otherwise registers are needed
            return PrefillTiles(64, 64, 4, 3, num_programs=2)
        return PrefillTiles(max(128, least), 64, 8, 5)
    # Softcapping, or masking a padded head, needs registers, so 64 columns of scores would spill.
    has_room = head_dim in (64, 128) and not softcap and not is_quantized
    return PrefillTiles(max(128, least), 64 if has_room else 32, 8, 3)


def paged_attention_triton(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    layout: PageLayout | None = None,
    paths: Tensor | None = None,
    last_seen: Tensor | None = None,
    decode: DecodeTiles | None = None,
    prefill: PrefillTiles | None = None,
) -> Tensor:
    """Attention of a ragged batch over pages; arguments as `kernels/attention/paged_attention.py` has them.

    `decode` and `prefill` override the rules above, for measurements and tests. The host does not synchronise, and the
    grids depend only on shapes, `max_query_len` and `max_seq_len`, so a captured graph serves shorter rows.
    """
    if out is None:
        out = torch.empty_like(q)
    if q.shape[0] == 0:
        return out
    num_rows = seq_lens.shape[0]
    facts, group = device_facts(q.device), q.shape[1] // k_pages.shape[1]
    if max_query_len == 1 or num_rows > 1:
        if decode is None:
            decode = decode_tiles(
                *(facts, num_rows, k_pages.shape[1], q.shape[2], max_seq_len, q.element_size(), group),
                is_quantized=layout is not None,
            )
        _launch_decode(
            q, k_pages, v_pages, page_table, query_start_loc, seq_lens, sinks, paths, out, scale, softcap, window,
            layout, decode,
        )  # fmt: skip
    if max_query_len > 1:
        if prefill is None:
            prefill = prefill_tiles(facts, q.shape[2], q.element_size(), group, softcap > 0, layout is not None)
        _launch_prefill(
            q, k_pages, v_pages, page_table, query_start_loc, seq_lens, sinks, last_seen, out, scale, softcap, window,
            layout, prefill,
        )  # fmt: skip
    return out


def _kind_of(window: int | None) -> Literal["", "sliding", "chunk"]:
    return "" if window is None else "sliding" if window > 0 else "chunk"


def _launch_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    paths: Tensor | None,
    out: Tensor,
    scale: float,
    softcap: float,
    window: int | None,
    layout: PageLayout | None,
    tiles: DecodeTiles,
) -> None:
    num_rows, num_q_heads, head_dim = seq_lens.shape[0], q.shape[1], q.shape[2]
    num_kv_heads, page_size = k_pages.shape[1], k_pages.shape[2] if layout is None else layout.page_size
    group = num_q_heads // num_kv_heads
    block_d = block_of_head(head_dim, layout)
    splits = tiles.num_splits
    partial = partial_lse = out  # not used with one split
    if splits > 1:
        shape = (num_rows, num_q_heads, splits)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    decode_kernel[(num_kv_heads, num_rows, splits)](
        q,
        k_pages,
        v_pages,
        page_table,
        query_start_loc,
        seq_lens,
        q if sinks is None else sinks,
        seq_lens if paths is None else paths,
        out,
        partial,
        partial_lse,
        scale,
        softcap,
        abs(window or 0),
        splits,
        q.stride(0),
        q.stride(1),
        k_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        page_table.stride(0),
        0 if paths is None else paths.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=max(16, next_power_of_two(group)),
        BLOCK_N=tiles.block_n,
        PAGE_SIZE=page_size,
        ONE_PAGE=page_size >= tiles.block_n and paths is None,
        SPLIT=splits > 1,
        MIN_TILES=tiles.min_tiles,
        WINDOW=_kind_of(window),
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        HAS_PATHS=paths is not None,
        PRECISION=_precision(q),
        FORMAT=format_of(layout, device_facts(q.device)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        # Of 4 warps. Left alone, ptxas spills a few registers to make room for a fourth program.
        maxnreg=_registers(tiles.num_warps, 3 if tiles.num_warps == 4 else 1),
    )
    if splits > 1:
        block_s = max(16, next_power_of_two(splits))
        combine_kernel[(num_q_heads, num_rows)](
            partial,
            partial_lse,
            query_start_loc,
            seq_lens,
            q if sinks is None else sinks,
            out,
            abs(window or 0),
            splits,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_N=tiles.block_n,
            PAGE_SIZE=page_size,
            BLOCK_S=block_s,
            MIN_TILES=tiles.min_tiles,
            WINDOW=_kind_of(window),
            HAS_SINKS=sinks is not None,
            num_warps=min(16, max(4, block_s * block_d // 4096)),
        )


def _launch_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    last_seen: Tensor | None,
    out: Tensor,
    scale: float,
    softcap: float,
    window: int | None,
    layout: PageLayout | None,
    tiles: PrefillTiles,
) -> None:
    num_rows, num_q_heads, head_dim = seq_lens.shape[0], q.shape[1], q.shape[2]
    num_kv_heads, page_size = k_pages.shape[1], k_pages.shape[2] if layout is None else layout.page_size
    group = num_q_heads // num_kv_heads
    block_q = tiles.block_m // group
    prefill_kernel[((q.shape[0] // block_q + num_rows) * num_kv_heads,)](
        q,
        k_pages,
        v_pages,
        page_table,
        query_start_loc,
        seq_lens,
        q if sinks is None else sinks,
        seq_lens if last_seen is None else last_seen,
        out,
        num_rows,
        scale,
        softcap,
        abs(window or 0),
        q.stride(0),
        q.stride(1),
        k_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        page_table.stride(0),
        out.stride(0),
        out.stride(1),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_of_head(head_dim, layout),
        BLOCK_M=tiles.block_m,
        BLOCK_Q=block_q,
        BLOCK_N=tiles.block_n,
        PAGE_SIZE=page_size,
        ONE_PAGE=page_size >= tiles.block_n,
        SKIP_SINGLE=num_rows > 1,
        WINDOW=_kind_of(window),
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        SEES_AHEAD=last_seen is not None,
        PRECISION=_precision(q),
        FORMAT=format_of(layout, device_facts(q.device)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=_registers(tiles.num_warps, tiles.num_programs),
    )


def _precision(q: Tensor) -> str:
    """fp32 products are exact, not tf32, because fp32 is chosen when tokens must equal those of another program."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _registers(num_warps: int, num_programs: int) -> int:
    """The most registers of a thread with which `num_programs` share a multiprocessor."""
    return min(255, 65536 // (32 * num_warps * num_programs) // 8 * 8)
