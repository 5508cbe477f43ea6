"""Where a sequence that is admitted starts: at a prefix hit, at a running sibling's prompt, or at its first token.

A fork. P prompt tokens; the sibling S has settled at least positions [0, P), F is the newcomer:

    positions    0 .................. f*page_size ......... P-1 ......... S's own outputs
    S's pages    [ page 0 ) ... [ page f-1 ) [ page f                    ) ...
    F's pages    [ the same pages, shared  ) [ page f', a copy of page f  )
    F computes                                             [P-1)

  - Pages [0, f), f = (P-1) // page_size, lie fully below position P-1. Nobody writes them again
    (S writes at P and above, F at P-1 and above), so both page tables hold them, by count.
  - Page f, if it begins below P-1, holds prompt positions that F needs and others that S goes on
    writing. F gets a page of its own and the plan that admits F copies f to f' before its forward pass.
    What the copy brings beyond P-2 is overwritten by F itself before F reads it.
  - The plans that wrote [0, P-1) were executed before: they are settled. S cannot lose page f before
    the copy: it is released at the earliest after this plan was made, and the worker executes
    plans in order, so whoever gets the page next writes it after the copy.
  - F computes position P-1 itself because that gives the logits for its own first token.

Sharing waits for *settled*, not only launched, positions: then every shared page is in the prefix
cache's tree (where there is one), F's cursor holds it there, and the count of evictable pages stays exact.

Where some layers see a window only, the sibling has freed what lies behind its own: nobody forks then, but starts at
the longest hit after the sibling has settled the prompt.
"""

from typing import NamedTuple

from penstock.core.kv.holder import Holder, Siblings
from penstock.core.kv.kv_pages import KVPages, PrefixHit


class Start(NamedTuple):
    """What a sequence need not compute, and where that comes from."""

    num_tokens: int
    page_ids: list[int]  # shared pages, in order
    copy_src: int  # page to copy into the next page of the sequence, or -1
    hit: PrefixHit  # what to keep in the prefix cache
    is_fork: bool


def find_start(seq: Holder, kv: KVPages) -> Start | None:
    """Choose the start that leaves the least to compute; None if a sibling's prompt is worth waiting for.

    Nothing is taken or kept: the caller does that before the next change to the pages.
    """
    hit = kv.find_prefix(seq)
    page_size = kv.page_size
    num_hit_tokens = len(hit.page_ids) * page_size
    # A sibling's prompt spares computing all positions but one: not if their logits are wanted.
    siblings = () if seq.owes_prompt_logprobs else seq.request.running
    last = seq.request.num_prompt_tokens - 1
    num_full_pages = last // page_size
    if siblings and num_hit_tokens < last:
        settled = [sibling for sibling in siblings if sibling.num_settled_tokens > last]
        if settled and not kv.windows:
            sibling = settled[0]
            pages = hit.page_ids if kv.cache is not None else sibling.page_ids[:num_full_pages]
            copy_src = sibling.page_ids[num_full_pages] if last % page_size else -1
            return Start(last, pages, copy_src, hit, is_fork=True)
        # A sibling that ends with its first token leaves nothing but what the prefix cache gets from it.
        can_fork = seq.request.can_fork and not kv.windows
        if not settled and (len(hit.page_ids) < num_full_pages if kv.cache is not None else can_fork):
            return None
    return Start(num_hit_tokens, hit.page_ids, -1, hit, is_fork=False)


def is_sibling_ready(request: Siblings) -> bool:
    """Tell whether a parked request has nothing more to wait for."""
    siblings = request.running
    return not siblings or any(sibling.num_settled_tokens >= request.num_prompt_tokens for sibling in siblings)
