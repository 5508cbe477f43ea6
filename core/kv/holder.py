"""What the page bookkeeping needs to know about sequences that hold pages."""

from array import array
from collections.abc import Hashable, Sequence
from typing import Protocol

from penstock.core.kv.page_pool import CacheNode
from penstock.core.kv.window_pages import WindowTable
from penstock.ipc.messages import CacheMiss


class Siblings(Protocol):
    """Sequences with a common prompt."""

    namespace: Hashable
    num_prompt_tokens: int
    marks: dict[int, bytes] | None  # of pages with images (`ipc/page_keys.py`)

    @property
    def running(self) -> Sequence["Holder"]:
        """The siblings that have a row."""

    @property
    def can_fork(self) -> bool:
        """Whether a sequence outlives the step that settles its prompt."""


class PageTables(Protocol):
    """A holder of pages."""

    page_ids: list[int]  # the page table
    window_tables: list[WindowTable]  # page tables of further page groups
    cache_node: CacheNode | None  # cursor in the prefix cache


class Holder(PageTables, Protocol):
    """A sequence with a page table; its counters are described in `core/sequences/sequence.py`."""

    token_ids: "array[int]"
    max_computed_tokens: int  # positions from here on are never computed
    num_unsettled_tokens: int
    launch_limit: int  # computed positions stay below this without new pages
    num_tree_pages: int  # page_ids[:num_tree_pages] are in the tree, down to the cursor
    page_seconds: float  # sum over its pages: minus the time it was taken, plus the time it was given back

    @property
    def request(self) -> Siblings:
        """The sequences of the same request, this one included."""

    @property
    def num_settled_tokens(self) -> int:
        """Number of tokens computed and returned."""

    @property
    def num_reusable_tokens(self) -> int:
        """Number of known tokens that need not be computed if they are cached."""

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether prompt positions must be computed even if they are cached."""


class RowHolder(Holder, Protocol):
    """A holder that has a row."""

    row: int
    cache_miss: CacheMiss  # why it did not start later in its prompt
