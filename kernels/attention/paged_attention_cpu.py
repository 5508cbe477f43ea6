"""The CPU path of paged attention: decode rows in groups of similar length, prefill rows one by one.

Pages are gathered into contiguous memory a bounded piece at a time. torch's fused attention runs on each
piece, and the pieces of one context are merged through their log-sum-exp (Dao et al., 2022), so memory does
not grow with query length times context.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention.kv_quantization import PageLayout, read_quantized

CONTEXT_PIECE = 8192  # keys gathered at once for a prefill row
QUERY_PIECE = 256  # queries at once where a mask or a score matrix is needed
NO_PATH = 2**31 - 1  # in place of a tree's first position, for a row that is not in a tree
GATHER_TOKENS = 1 << 16  # keys gathered at once for a group of decode rows


def first_seen(position: int, window: int | None) -> int:
    """The first position that a query sees; the window is as in `paged_attention`."""
    if window is None:
        return 0
    return max(0, position - window + 1) if window > 0 else position - position % -window


class DecodeGroup(NamedTuple):
    """Rows with one query each and contexts of similar length, padded to the longest (G rows, P pages, S keys)."""

    tokens: Tensor | None  # int64[G], index into q; None if the group is the whole batch in order
    page_runs: Tensor  # int64[G * Hk * P], index of each page's run of one head
    num_rows: int
    num_keys: int  # S <= P * page_size
    mask: Tensor | None  # [G, 1, 1, S], 0 or -inf; None if every row sees every key
    moved: "MovedKeys | None" = None  # for nodes of trees


class MovedKeys(NamedTuple):
    """M keys of a group that are not at the places of their positions."""

    rows: Tensor  # int64[M], row in the group
    keys: Tensor  # int64[M], key in [0, S)
    pages: Tensor  # int64[M], the page that holds it
    offsets: Tensor  # int64[M], its offset in the page


class PrefillRow(NamedTuple):
    """A row with several queries."""

    first_token: int  # index into q
    query_len: int
    seq_len: int
    pages: Tensor  # int64[num_pages of the row]


class CpuAttentionPlan:
    """How one batch's attention is split; made once per step and used by all layers."""

    def __init__(
        self,
        starts: list[int],
        seq_lens: list[int],
        page_table: Tensor,
        page_size: int,
        num_kv_heads: int,
        paths: Tensor | None = None,
    ) -> None:
        self.page_table = page_table
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.num_tokens = starts[-1]
        self._paths = paths
        self._decodes: list[tuple[int, int, int]] = []  # (seq_len, batch row, token)
        self.prefills: list[PrefillRow] = []
        for b, seq_len in enumerate(seq_lens):
            query_len = starts[b + 1] - starts[b]
            if query_len == 1:
                self._decodes.append((seq_len, b, starts[b]))
            elif query_len > 1:
                pages = page_table[b, : math.ceil(seq_len / page_size)].long()
                self.prefills.append(PrefillRow(starts[b], query_len, seq_len, pages))
        self._groups: dict[tuple[int | None, torch.dtype], list[DecodeGroup]] = {}
        self._masks: dict[tuple[int, int, int, int, int, torch.dtype], Tensor] = {}

    def decode_groups(self, window: int | None, dtype: torch.dtype = torch.float32) -> list[DecodeGroup]:
        """The decode rows in groups, with masks of this dtype. Layers with the same window share the groups."""
        key = (window, dtype)
        if key not in self._groups:
            self._groups[key] = self._group(window, dtype)
        return self._groups[key]

    def window_mask(
        self, num_queries: int, num_keys: int, ahead: int, first: int, window: int, dtype: torch.dtype
    ) -> Tensor:
        """[num_queries, num_keys]: 0 where a query sees a key, else -inf. It is made once for all layers.

        Query i is at position `first` + i, which is `ahead` + i positions after the first key.
        """
        key = (num_queries, num_keys, ahead, first % -window if window < 0 else 0, window, dtype)
        if key not in self._masks:
            distance = torch.arange(ahead, ahead + num_queries)[:, None] - torch.arange(num_keys)
            num_seen = torch.arange(first, first + num_queries)[:, None] % -window + 1 if window < 0 else window
            hidden = (distance < 0) | (distance >= num_seen)
            self._masks[key] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._masks[key]

    def _group(self, window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
        page_size = self.page_size
        # (keys to gather, batch row, token, first page, seq_len): with a window, old pages are skipped.
        rows = []
        for seq_len, b, token in self._decodes:
            first_page = first_seen(seq_len - 1, window) // page_size
            rows.append((seq_len - first_page * page_size, b, token, first_page, seq_len))
        if not rows:
            return []
        longest, shortest = max(row[0] for row in rows), min(row[0] for row in rows)
        if longest * len(rows) <= GATHER_TOKENS and longest <= 2 * shortest + 64:
            return [self._make_group(rows, window, dtype)]
        # Longest first; a group ends where padding would more than double a row's work.
        rows.sort(key=lambda row: (-row[0], row[1]))
        groups, begin = [], 0
        for end in range(1, len(rows) + 1):
            longest = rows[begin][0]
            full = (end - begin + 1) * longest > GATHER_TOKENS
            if end == len(rows) or full or rows[end][0] * 2 + 64 < longest:
                groups.append(self._make_group(rows[begin:end], window, dtype))
                begin = end
        return groups

    def _make_group(
        self, rows: list[tuple[int, int, int, int, int]], window: int | None, dtype: torch.dtype
    ) -> DecodeGroup:
        num_keys = max(row[0] for row in rows)
        num_pages = math.ceil(num_keys / self.page_size)
        batch_rows = torch.tensor([row[1] for row in rows])
        width = self.page_table.shape[1]
        whole_table = window is None and num_pages <= width
        if whole_table:
            pages = self.page_table[:, :num_pages].index_select(0, batch_rows).long()
        else:
            columns = torch.tensor([row[3] for row in rows])[:, None] + torch.arange(num_pages)
            pages = self.page_table[batch_rows[:, None], columns.clamp_(max=width - 1)].long()
        lens = torch.tensor([row[0] for row in rows])
        # Columns past a row's last page hold page ids of an earlier owner; they are masked, but must be valid.
        pages.mul_(torch.arange(num_pages) * self.page_size < lens[:, None])
        runs = pages[:, None, :] * self.num_kv_heads + torch.arange(self.num_kv_heads)[:, None]
        mask = None
        firsts = [first_seen(row[4] - 1, window) - row[3] * self.page_size for row in rows]
        if any(row[0] != num_keys for row in rows) or any(firsts):
            keys = torch.arange(num_keys)
            seen = (keys < lens[:, None]) & (keys >= torch.tensor(firsts)[:, None])
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None, None, :]
        tokens = [row[2] for row in rows]
        in_order = len(tokens) == self.num_tokens and tokens == list(range(len(tokens)))
        index = None if in_order else torch.tensor(tokens)
        moved = None if self._paths is None else self._find_moved(self._paths, rows)
        return DecodeGroup(index, runs.view(-1), len(rows), num_keys, mask, moved)

    def _find_moved(self, paths: Tensor, rows: list[tuple[int, int, int, int, int]]) -> MovedKeys | None:
        found: list[tuple[int, int, int, int]] = []  # (row of the group, key, batch row, place)
        for i, (_, b, _, first_page, seq_len) in enumerate(rows):
            first, *places = paths[b].tolist()
            skipped = first_page * self.page_size
            found += [
                (i, first + j - skipped, b, place)
                for j, place in enumerate(places[: max(0, seq_len - first)])
                if first + j >= skipped
            ]
        if not found:
            return None
        group_rows, keys, batch_rows, at = torch.tensor(found).unbind(1)
        pages = self.page_table[batch_rows, at // self.page_size].long()
        return MovedKeys(group_rows, keys, pages, at % self.page_size)


def plan_cpu_attention(
    query_start_loc: list[int],
    seq_lens: list[int],
    page_table: Tensor,
    page_size: int,
    num_kv_heads: int,
    paths: Tensor | None = None,
) -> CpuAttentionPlan:
    """Split a batch for `paged_attention_cpu`.

    Args:
        query_start_loc: N + 1 offsets.
        seq_lens: N context lengths.
        page_table: int32 [N, max_pages], already one row per batch row.
        page_size: tokens per page.
        num_kv_heads: Hk.
        paths: as in `paged_attention`.
    """
    return CpuAttentionPlan(query_start_loc, seq_lens, page_table, page_size, num_kv_heads, paths)


def paged_attention_cpu(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: CpuAttentionPlan,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    layout: PageLayout | None = None,
) -> Tensor:
    """Arguments and result as in `paged_attention`."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    _, num_q_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[1]
    for group in plan.decode_groups(window, q.dtype):
        rows = q if group.tokens is None else q.index_select(0, group.tokens)
        # The query heads that share a key-value head are treated as several queries of that head.
        packed = rows.view(group.num_rows, num_kv_heads, -1, head_dim)
        k = _gather_group(k_pages, group, layout, q.dtype)
        v = _gather_group(v_pages, group, layout, q.dtype)
        attended, lse = attend(packed, k, v, group.mask, False, scale, softcap)
        result = attended.reshape(group.num_rows, num_q_heads, head_dim)
        if sinks is not None:
            _apply_sinks(result, lse.reshape(group.num_rows, num_q_heads), sinks)
        if group.tokens is None:
            out.copy_(result)
        else:
            out.index_copy_(0, group.tokens, result)
    for row in plan.prefills:
        _prefill(q, k_pages, v_pages, plan, row, scale, window, softcap, sinks, out, layout)
    return out


def gather_group(pages: Tensor, group: DecodeGroup) -> Tensor:
    """-> [G, Hk, S, D]"""
    _, num_kv_heads, page_size, head_dim = pages.shape
    runs = pages.reshape(-1, page_size * head_dim).index_select(0, group.page_runs)
    return runs.view(group.num_rows, num_kv_heads, -1, head_dim)[:, :, : group.num_keys]


def gather_row(pages: Tensor, page_ids: Tensor, begin: int, end: int) -> Tensor:
    """Positions [begin, end) of a sequence -> [1, Hk, end - begin, D]"""
    return _positions(pages.index_select(0, _pages_of(page_ids, begin, end, pages.shape[2])), begin, end)


def _gather_group(pages: Tensor, group: DecodeGroup, layout: PageLayout | None, dtype: torch.dtype) -> Tensor:
    if layout is None:
        keys = gather_group(pages, group)
    else:
        runs = read_quantized(pages.view(-1, pages.shape[-1]).index_select(0, group.page_runs), layout)
        keys = runs.to(dtype).view(group.num_rows, pages.shape[1], -1, layout.head_dim)[:, :, : group.num_keys]
    if (moved := group.moved) is not None:
        if layout is not None:  # dequantizes whole pages, since few keys are moved
            its = read_quantized(pages.index_select(0, moved.pages), layout)
            its = its[torch.arange(len(moved.pages)), :, moved.offsets].to(dtype)
        else:
            its = pages[moved.pages, :, moved.offsets]
        keys[moved.rows, :, moved.keys] = its
    return keys


def _gather_row(
    pages: Tensor, page_ids: Tensor, begin: int, end: int, layout: PageLayout | None, dtype: torch.dtype
) -> Tensor:
    if layout is None:
        return gather_row(pages, page_ids, begin, end)
    run = pages.index_select(0, _pages_of(page_ids, begin, end, layout.page_size))
    return _positions(read_quantized(run, layout).to(dtype), begin, end)


def _pages_of(page_ids: Tensor, begin: int, end: int, page_size: int) -> Tensor:
    return page_ids[begin // page_size : math.ceil(end / page_size)]


def _positions(run: Tensor, begin: int, end: int) -> Tensor:
    """Neighbouring pages [P, Hk, page_size, D] -> [1, Hk, end - begin, D]"""
    skipped = begin - begin % run.shape[2]
    return run.transpose(0, 1).flatten(1, 2)[None, :, begin - skipped : end - skipped]


def _prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    plan: CpuAttentionPlan,
    row: PrefillRow,
    scale: float,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
    layout: PageLayout | None,
) -> None:
    cached = row.seq_len - row.query_len
    plain = window is None and not softcap
    step = CONTEXT_PIECE if plain else QUERY_PIECE
    for i in range(0, row.query_len, step):
        count = min(step, row.query_len - i)
        begin, end = cached + i, cached + i + count  # positions of these queries
        tokens = slice(row.first_token + i, row.first_token + i + count)
        queries = q[tokens].transpose(0, 1)[None]
        result: Tensor | None = None
        lse = torch.empty(0)
        first_key = first_seen(begin, window)
        # The diagonal piece first: there every query sees at least itself, so no log-sum-exp is empty.
        for key_begin, key_end in [(begin, end), *_pieces(first_key, begin)]:
            mask = None
            if window is not None and first_seen(end - 1, window) > key_begin:
                mask = plan.window_mask(count, key_end - key_begin, begin - key_begin, begin, window, q.dtype)
            k = _gather_row(k_pages, row.pages, key_begin, key_end, layout, q.dtype)
            v = _gather_row(v_pages, row.pages, key_begin, key_end, layout, q.dtype)
            part, part_lse = attend(queries, k, v, mask, key_begin == begin and mask is None, scale, softcap)
            if result is None:
                result, lse = part, part_lse
            else:
                result, lse = merge(result, lse, part, part_lse)
        assert result is not None
        result = result[0].transpose(0, 1)
        if sinks is not None:
            _apply_sinks(result, lse[0].transpose(0, 1), sinks)
        out[tokens] = result


class SeenWhole(NamedTuple):
    """Consecutive tokens of a row that all see up to the last of them."""

    first_token: int  # index into q
    begin: int  # position of the first token
    end: int  # position after the last token
    pages: Tensor  # int64, the row's pages


def attend_whole(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    seen: SeenWhole,
    scale: float,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
    layout: PageLayout | None,
) -> None:
    """Attention of these tokens over their row, written to `out`. A window limits only the positions before them.

    The other arguments are as in `paged_attention`.
    """
    if window is not None and window < 0:
        raise ValueError("chunks of positions do not see those behind them")
    _, begin, end, pages = seen
    tokens = slice(seen.first_token, seen.first_token + end - begin)
    first = first_seen(begin, window)
    mask = None
    if window is not None:
        distance = torch.arange(begin, end)[:, None] - torch.arange(first, end)
        mask = torch.zeros(distance.shape, dtype=q.dtype).masked_fill_(distance >= window, -torch.inf)
    k, v = (_gather_row(of, pages, first, end, layout, q.dtype) for of in (k_pages, v_pages))
    attended, lse = attend(q[tokens].transpose(0, 1)[None], k, v, mask, False, scale, softcap)
    result = attended[0].transpose(0, 1)
    if sinks is not None:
        _apply_sinks(result, lse[0].transpose(0, 1), sinks)
    out[tokens] = result


def _pieces(begin: int, end: int) -> list[tuple[int, int]]:
    return [(piece, min(piece + CONTEXT_PIECE, end)) for piece in range(begin, end, CONTEXT_PIECE)]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, L, D], k and v [B, Hk, S, D] -> (out [B, Hq, L, D], lse fp32 [B, Hq, L]).

    A query that `mask` leaves without a key gets lse = -inf, or a zero output with an undefined lse. Callers make
    sure that this happens only where another piece has the query's keys.
    """
    if not softcap:
        attended, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        if mask is not None and mask.ndim == 2:
            # The fused kernel reports 0 for a query without keys.
            lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        return attended, lse
    batch, num_q_heads, num_queries, head_dim = q.shape
    num_kv_heads = k.shape[1]
    packed = q.reshape(batch, num_kv_heads, -1, head_dim).float()
    scores = (packed @ k.float().transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    scores = scores.view(batch, num_q_heads, num_queries, -1)
    if causal:
        mask = torch.full(scores.shape[-2:], -torch.inf).triu_(1)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=-1e30)[..., None]).exp_().view(batch, num_kv_heads, -1, scores.shape[-1])
    return (weights @ v.float()).to(q.dtype).view(q.shape), lse


def merge(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over two sets of keys from the softmaxes over each. `a_lse` is finite."""
    lse = torch.logaddexp(a_lse, b_lse)
    a_weight = (a_lse - lse).exp()[..., None]
    b_weight = (b_lse - lse).exp()[..., None]
    return (a * a_weight + b * b_weight).to(a.dtype), lse


def _apply_sinks(attended: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Give each head's sink its share of the softmax: attended [..., Hq, D], lse [..., Hq], sinks [Hq]."""
    attended.mul_((lse - sinks.float()).sigmoid_()[..., None])
