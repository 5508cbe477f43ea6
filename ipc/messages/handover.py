"""Prefill and decode apart: how KV pages go from the engine that computed a prompt to the one that decodes it.

    decode engine's scheduler  -> prefill engine's   AddRequest with `handover_from`, AbortRequest, HandoverTaken
    prefill engine's scheduler -> decode engine's    TokenBatch with the end of that request, HandoverReleased
    scheduler -> its workers                         OfferKV, WithdrawKV; ReceiveKV, StopReceivingKV
    worker -> its scheduler                          KVReceived
    decode engine's worker -> prefill engine's       FollowKV, UnfollowKV, ReadKV
    prefill engine's worker -> decode engine's       KVPages, KVLayers, KVData

To the prefill engine, the decode engine acts like a frontend. Pages are named by page group, index in the page table
of that group, and number in the pool. Rank r reads from rank r of the other engine.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.ipc.messages.base import Buffer, Message, ShortText

Role = Literal["", "both", "prefill", "decode"]
"""What an engine does; empty: everything, without handing pages over."""

_Text = Annotated[str, Meta(max_length=4096)]


class KVSource(Struct, frozen=True, array_like=True, gc=False):
    """How workers of other engines read the KV pages of one rank."""

    address: _Text  # of its socket
    transports: tuple[ShortText, ...]  # transports over which it can be read, the best first
    pages: tuple[tuple[ShortText, _Text], ...]  # the format of its pages, as (name, value): must be equal on both sides
    places: dict[ShortText, Buffer]  # by transport: where its pages are


class HandoverTaken(Message, frozen=True):
    """All pages of a prompt have been read: the prefill engine may free them. `HandoverReleased` answers."""

    request_id: ShortText


class HandoverReleased(Message, frozen=True):
    """Whether the pages were kept until now, so that what was read is valid."""

    request_id: ShortText
    is_right: bool


class SetRole(Message, frozen=True):
    """Set what an engine does from now on. Requests that it has are not affected."""

    role: Role


class OfferKV(Message, frozen=True):
    """Pages that will be filled once a step has been computed: sent before that step's plan."""

    handover_id: ShortText
    step_id: int
    pages: Buffer  # int32[pages, 3]: group, index in the page table, page


class WithdrawKV(Message, frozen=True):
    """A handover's pages are reused for something else."""

    handover_id: ShortText


class ReceiveKV(Message, frozen=True):
    """Fill pages from another engine's while steps go on; `KVReceived` answers once.

    Nothing else uses these pages until then. Before they are first written to, all plans sent earlier have been
    computed.
    """

    handover_id: ShortText
    sources: tuple[KVSource, ...]  # of each rank
    pages: Buffer  # int32[pages, 3]


class StopReceivingKV(Message, frozen=True):
    """The pages are no longer wanted."""

    handover_id: ShortText


class KVReceived(Message, frozen=True):
    """All pages of a handover have arrived, or nothing more will be written to them."""

    handover_id: ShortText
    num_bytes: int = 0
    error: _Text = ""  # why the pages have not arrived
    failed_transports: tuple[ShortText, ...] = ()  # have failed, each on a link that is open


class FollowKV(Message, frozen=True):
    """Asks to be told which pages of a handover are ready, from its beginning on."""

    handover_id: ShortText


class UnfollowKV(Message, frozen=True):
    """Ends a `FollowKV`."""

    handover_id: ShortText


class KVPages(Message, frozen=True):
    """An offer: its pages are being computed, or ready."""

    handover_id: ShortText
    number: int  # of the offer, among those of its handover
    pages: Buffer  # int32[pages, 3]


class KVLayers(Message, frozen=True):
    """The first layers of an offer can be read."""

    handover_id: ShortText
    number: int
    num_layers: int


class ReadKV(Message, frozen=True):
    """Asks for parts of pages over this connection; `KVData` answers, followed by a frame with the bytes."""

    read_id: int
    first_part: int
    end_part: int
    pages: Buffer  # int32[pages], in the pool


class KVData(Message, frozen=True):
    """The next frame has the requested parts: uint8[parts, pages, bytes of a part]."""

    read_id: int
