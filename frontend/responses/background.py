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
from penstock.frontend.responses.course import ResponseCourse
from penstock.frontend.schema_responses import ResponsesRequest

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
    if not service.responses.is_on:
        raise UnsupportedParameter(
            "background: this server stores no responses (--max-stored-response-bytes)", param="background"
        )
    if record.is_background:
        raise UnsupportedParameter("background: a batch waits for its responses anyway", param="background")


async def in_background(reply: StreamReply, course: ResponseCourse, *, is_streamed: bool) -> StreamReply:
    """Let a stream go on in the background; the client gets the queued response, or the stream.

    Raises:
        NotStored: there is no room for the response.
    """
    if not await course.keep(is_running=True):
        reply.close()
        raise NotStored("the response could not be stored, so it was not begun")
    answer = None if is_streamed else Reply(msgspec.json.encode(course.shown()))
    return replace(reply, chunks=_followed(reply, course), background=Background(course.id, answer))


async def _followed(reply: StreamReply, course: ResponseCourse) -> AsyncGenerator[bytes, None]:
    """Pass on a stream's pieces; meanwhile update the response in the store."""
    told, renewed = course.status, monotonic()
    async for piece in reply.chunks:
        if course.status != told and not course.is_over:
            told = course.status
            await course.keep(is_running=True, is_known=True)
        elif monotonic() - renewed > _RENEW_SECONDS and not course.is_over:
            renewed = monotonic()
            await course.renew()
        yield piece
    if course.status in ("failed", "cancelled"):
        await course.keep(is_known=True)
