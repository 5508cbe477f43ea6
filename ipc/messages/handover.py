"""Prefill and decode apart: how KV pages go from the engine that computed a prompt to the one that decodes it.

    decode engine's scheduler  -> prefill engine's   AddRequest with `handover_from`, AbortRequest, HandoverTaken
    prefill engine's scheduler -> decode engine's    TokenBatch with the end of that request, HandoverReleased

To the prefill engine, the decode engine acts like a frontend. Their workers have messages of their own.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.ipc.messages.base import Buffer, Message, ShortText

Role = Literal["", "both", "prefill", "decode"]
"""What an engine does; empty: everything, without handing pages over."""

Text = Annotated[str, Meta(max_length=4096)]


class KVSource(Struct, frozen=True, array_like=True, gc=False):
    """How workers of other engines read the KV pages of one rank."""

    address: Text  # of its socket
    transports: tuple[ShortText, ...]  # transports over which it can be read, the best first
    pages: tuple[tuple[ShortText, Text], ...]  # the format of its pages, as (name, value): must be equal on both sides
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
