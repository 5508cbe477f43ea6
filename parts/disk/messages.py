"""What scheduler and worker tell each other of pages on the disk."""

from typing import Annotated

from msgspec import Meta

from penstock.ipc.messages import Message, ShortText

_MAX_MOVED = 2**16

PageKeys = Annotated[bytes, Meta(max_length=16 * _MAX_MOVED)]
"""16 bytes for each page."""

PageNumbers = Annotated[bytes, Meta(max_length=4 * _MAX_MOVED)]
"""int32[pages]"""

PageFlags = Annotated[bytes, Meta(max_length=_MAX_MOVED)]
"""uint8[pages]"""


class StoreKV(Message, frozen=True):
    """Write host pages to the disk while steps go on; `KVStored` answers. The steps that filled them have returned.

    Places are overwritten. Before the answer the scheduler uses neither the pages nor the places for anything else.
    """

    move_id: int  # never reused
    keys: PageKeys  # of the pages' content
    host_pages: PageNumbers
    places: PageNumbers  # on the disk


class LoadKV(Message, frozen=True):
    """Fill host pages from the disk while steps go on; `KVLoaded` answers. No step in flight uses these pages."""

    move_id: int
    keys: PageKeys  # what the places hold
    host_pages: PageNumbers
    places: PageNumbers


class DropStoredKV(Message, frozen=True):
    """Empty all places, after all earlier orders are done."""


class KVStored(Message, frozen=True):
    """Host pages were written to the disk."""

    move_id: int
    ok: PageFlags  # whether each page is at its place; otherwise the place is empty
    num_us: int = 0  # time that it took, without waiting in the queue
    error: ShortText = ""  # why the first page that failed could not be written


class KVLoaded(Message, frozen=True):
    """Host pages were filled from the disk."""

    move_id: int
    ok: PageFlags  # whether each page is what was stored; otherwise its place is now empty
    num_us: int = 0
    error: ShortText = ""


class DiskContents(Message, frozen=True):
    """What the disk holds for this model, sent in pieces after each `Welcome`. Places that no piece names are empty."""

    places: PageNumbers  # least recently used first
    keys: PageKeys
    is_last: bool
    unusable: PageNumbers = b""  # in the last piece: places that must stay empty


TO_WORKER = (StoreKV, LoadKV, DropStoredKV)
FROM_WORKER = (KVStored, KVLoaded, DiskContents)
