"""Prefill and decode apart: how KV pages go from the engine that computed a prompt to the one that goes on with it.

    decode engine's scheduler  -> prefill engine's   AddRequest with `handover_from`, AbortRequest, HandoverTaken
    prefill engine's scheduler -> decode engine's    TokenBatch with the end of that request, HandoverReleased
    scheduler -> its workers                         OfferKV, WithdrawKV; ReceiveKV, StopReceivingKV
    worker -> its scheduler                          KVReceived
    decode engine's worker -> prefill engine's       FollowKV, UnfollowKV, ReadKV
    prefill engine's worker -> decode engine's       KVPages, KVLayers, KVData

The decode engine is to the prefill engine what a frontend is. Pages are named by page group, index in the page table
of that group, and number in the pool. Rank r reads what rank r of the other engine has.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.ipc.messages.base import Buffer, Message, ShortText

Role = Literal["", "both", "prefill", "decode"]
"""What an engine does; empty: everything, and it hands no pages over."""

_Text = Annotated[str, Meta(max_length=4096)]


class KVSource(Struct, frozen=True, array_like=True, gc=False):
    """How the KV pages of one rank are read by workers of other engines."""

    address: _Text  # of its socket
    transports: tuple[ShortText, ...]  # those it can be read by, the best first
    pages: tuple[tuple[ShortText, _Text], ...]  # what its pages are, as (name, value): must be equal on both sides
    places: dict[ShortText, Buffer]  # by transport: where its pages are


class HandoverTaken(Message, frozen=True):
    """All pages of a prompt have been read: the prefill engine need not keep them. `HandoverReleased` answers."""

    request_id: ShortText


class HandoverReleased(Message, frozen=True):
    """Whether the pages were kept until now, so that what was read is right."""

    request_id: ShortText
    is_right: bool


class SetRole(Message, frozen=True):
    """What an engine does from now on. Requests that it has go on as they are."""

    role: Role


class OfferKV(Message, frozen=True):
    """Pages that hold what they are to hold when a step has been computed: sent before its plan."""

    handover_id: ShortText
    step_id: int
    pages: Buffer  # int32[pages, 3]: group, index in the page table, page


class WithdrawKV(Message, frozen=True):
    """A handover's pages are given to others."""

    handover_id: ShortText


class ReceiveKV(Message, frozen=True):
    """Fill pages from another engine's, beside steps; `KVReceived` answers once. Nobody else has these pages until
    then, and plans sent before have been computed when they are first written to."""

    handover_id: ShortText
    sources: tuple[KVSource, ...]  # of each rank
    pages: Buffer  # int32[pages, 3]


class StopReceivingKV(Message, frozen=True):
    """The pages are no longer wanted."""

    handover_id: ShortText


class KVReceived(Message, frozen=True):
    """All pages of a handover are there, or nothing more is written to them."""

    handover_id: ShortText
    num_bytes: int = 0
    error: _Text = ""  # why they are not there
    failed_transports: tuple[ShortText, ...] = ()  # switched off since the worker's start


class FollowKV(Message, frozen=True):
    """Tell me what is ready of a handover, from its beginning."""

    handover_id: ShortText


class UnfollowKV(Message, frozen=True):
    """Tell me no more."""

    handover_id: ShortText


class KVPages(Message, frozen=True):
    """An offer: its pages are being computed, or are there."""

    handover_id: ShortText
    number: int  # of the offer, among those of its handover
    pages: Buffer  # int32[pages, 3]


class KVLayers(Message, frozen=True):
    """The first layers of an offer can be read."""

    handover_id: ShortText
    number: int
    num_layers: int


class ReadKV(Message, frozen=True):
    """Send parts of pages over this connection; a frame with the bytes follows `KVData`."""

    read_id: int
    first_part: int
    end_part: int
    pages: Buffer  # int32[pages], in the pool


class KVData(Message, frozen=True):
    """The next frame has what was asked for: uint8[parts, pages, bytes of a part]."""

    read_id: int
