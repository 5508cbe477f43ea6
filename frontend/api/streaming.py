"""A stream's course, the same for chat and completions: opening, chunks as they come, usage, [DONE]."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import structlog

from penstock.frontend.api.service import Service
from penstock.frontend.engine.generation import Generation, SequenceEvent
from penstock.frontend.errors import ApiError, from_exception
from penstock.frontend.exchange import sse
from penstock.frontend.exchange.replies import RequestRecord, StreamReply
from penstock.frontend.schema import Usage
from penstock.frontend.validation.common import ValidRequest

log = structlog.get_logger()

FIRST_TOKEN_WAIT_SECONDS = 1.0
"""How long a stream's status line waits, so that a refusal by the engine can still be a status code."""


class Chunks(Protocol):
    """Makes the bytes of one endpoint's chunks."""

    def event(self, event: SequenceEvent, usage: Usage | None = None) -> bytes:
        """The chunk of an event; empty if it shows nothing."""
        ...

    def end(self, usage: Usage | None) -> bytes:
        """The bytes that end a complete stream; with the whole request's usage, if it is given."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The bytes that end a stream that fails."""
        ...


async def stream_reply(
    service: Service,
    record: RequestRecord,
    valid: ValidRequest,
    generation: Generation,
    chunks: Chunks,
    opening: bytes,
    before_end: Callable[[], Awaitable[bytes]] | None = None,
) -> StreamReply:
    """Wait a moment for a first sign of the engine, then answer with a stream, which ends with what `before_end` says.

    Raises:
        ApiError: if the engine refuses the request in that moment.
    """
    await generation.wait_first(FIRST_TOKEN_WAIT_SECONDS)
    return StreamReply(
        _stream(service, record, valid, generation, chunks, opening, before_end),
        close=lambda: service.finish(generation, record),
        headers=sse.HEADERS,
    )


async def _stream(
    service: Service,
    record: RequestRecord,
    valid: ValidRequest,
    generation: Generation,
    chunks: Chunks,
    opening: bytes,
    before_end: Callable[[], Awaitable[bytes]] | None,
) -> AsyncGenerator[bytes, None]:
    pending = opening
    try:
        if not generation.has_news:
            yield pending or sse.KEEP_ALIVE  # the client may know that its request was taken in
            pending = b""
        while not generation.is_finished:
            events = await generation.next_events()
            usage = service.usage(generation, record) if valid.continuous_usage else None
            for event in events:
                pending += chunks.event(event, usage)
            if pending or not events:
                yield pending or sse.KEEP_ALIVE
                pending = b""
        end = chunks.end(service.usage(generation, record) if valid.include_usage else None)
        if before_end is not None:
            end = await before_end() + end
        yield end
    except Exception as error:
        if not isinstance(error, ApiError):
            log.exception("stream failed")
        record.error = from_exception(error)
        yield pending + chunks.failure(record.error)
    finally:
        service.finish(generation, record)
