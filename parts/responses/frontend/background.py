"""Responses in the background: they go on without a client, and can be polled, followed and cancelled.

    POST background: true ──▶ stored as queued ──▶ the stream is kept (`frontend/streams/`) ──▶ stored at its end
    GET, POST .../cancel  ──▶ the store, which all frontends share; the stream at whichever frontend keeps it

A response survives its client, but not its frontend: if the frontend ends, the response's lease runs out, and it counts
as failed.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace
from time import monotonic

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter, ServerError, UnsupportedParameter
from penstock.frontend.exchange.replies import Background, Reply, RequestRecord, StreamReply
from penstock.parts.responses.frontend.part import stored_by
from penstock.parts.responses.frontend.response_writer import ResponseWriter
from penstock.parts.responses.frontend.schema import ResponsesRequest

_RENEW_SECONDS = 10.0


class NotStored(ServerError, status=507, code="storage_full", may_retry=False):
    """A response that must be stored could not be stored."""


def check_background(service: Service, record: RequestRecord, request: ResponsesRequest) -> None:
    """Refuse a response in the background that could not be found again.

    Raises:
        InvalidParameter: the response would not be stored.
        UnsupportedParameter: this server keeps no streams or stores no responses, or the request is part of a batch.
    """
    if request.store is False:
        raise InvalidParameter("background responses are stored: store must not be false", param="background")
    if not service.streams.is_on:
        raise UnsupportedParameter(
            "background: this server keeps no streams (--max-resumable-bytes)", param="background"
        )
    if not stored_by(service).responses.is_on:
        raise UnsupportedParameter(
            "background: this server stores no responses (--max-stored-response-bytes)", param="background"
        )
    if record.is_background:
        raise UnsupportedParameter("background: a batch waits for its responses anyway", param="background")


async def in_background(reply: StreamReply, writer: ResponseWriter, *, is_streamed: bool) -> StreamReply:
    """Let a stream go on in the background; the client gets the queued response, or the stream.

    Raises:
        NotStored: there is no room for the response.
    """
    if not await writer.keep(is_running=True):
        reply.close()
        raise NotStored("the response could not be stored, so it was not begun")
    answer = None if is_streamed else Reply(msgspec.json.encode(writer.shown()))
    return replace(reply, chunks=_followed(reply, writer), background=Background(writer.id, answer))


async def _followed(reply: StreamReply, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    """Pass on a stream's pieces; meanwhile update the response in the store."""
    told, renewed = writer.status, monotonic()
    async for piece in reply.chunks:
        if writer.status != told and not writer.is_over:
            told = writer.status
            await writer.keep(is_running=True, is_known=True)
        elif monotonic() - renewed > _RENEW_SECONDS and not writer.is_over:
            renewed = monotonic()
            await writer.renew()
        yield piece
    if writer.status in ("failed", "cancelled"):
        await writer.keep(is_known=True)
