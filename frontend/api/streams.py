"""GET and DELETE /v1/streams/{id}: streams that outlive their connections."""

import msgspec

from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.streams.keeper import STOPPED, StreamNotFound, StreamStopped

POSITION_HEADER = "last-event-id"
"""The header that browsers send to continue a stream; `starting_after` takes precedence over it."""

_FROM_BEGINNING = -1
_MOST = 1 << 31


class DeletedStream(msgspec.Struct, frozen=True):
    id: str
    object: str = "stream"
    deleted: bool = True


def position(record: RequestRecord) -> int:
    """The number of the last event that the client has, from its query or its Last-Event-ID; -1: none.

    Raises:
        InvalidParameter: if it is not a valid number.
    """
    given = record.query.get("starting_after") or next(iter(record.headers.get(POSITION_HEADER, ())), "")
    if not given:
        return _FROM_BEGINNING
    if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= _MOST):
        raise InvalidParameter(
            f"starting_after, or Last-Event-ID, must be an event's number, got {given[:32]!r}", param="starting_after"
        )
    return int(given)


async def continued(service: Service, owner: str, stream_id: str, after: int) -> StreamReply | None:
    """The events of a stream after number `after`, whichever frontend keeps it; None if no frontend does.

    Raises:
        EventsGone: if these events are no longer kept.
    """
    kept = service.streams.find(owner, stream_id)
    if kept is not None:
        await kept.begun.wait()
        return kept.reader(after) if kept.is_begun else None
    return None if service.siblings is None else await service.siblings.read(owner, stream_id, after)


async def stopped(service: Service, owner: str, stream_id: str) -> bool:
    """Stop a stream, whichever frontend keeps it; return whether it exists."""
    kept = service.streams.find(owner, stream_id)
    if kept is not None:
        await kept.begun.wait()
        kept.stop(StreamStopped(STOPPED))
        return True
    return service.siblings is not None and await service.siblings.stop(owner, stream_id)


async def continue_stream(service: Service, record: RequestRecord, body: bytes) -> StreamReply:
    """Continue a stream after an event, over this connection.

    Raises:
        StreamNotFound: no frontend keeps the stream, or it belongs to another key.
        EventsGone: the requested events are no longer kept.
        InvalidParameter: the position is not a number.
    """
    found = await continued(service, record.key_id, record.argument, position(record))
    if found is None:
        raise _not_here(service, record.argument)
    return found


async def stop_stream(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """End a stream's request, and forget the stream.

    Raises:
        StreamNotFound: no frontend keeps the stream, or it belongs to another key.
    """
    if not await stopped(service, record.key_id, record.argument):
        raise _not_here(service, record.argument)
    return Reply(msgspec.json.encode(DeletedStream(record.argument)))


def _not_here(service: Service, stream_id: str) -> StreamNotFound:
    reason = "it was not sent with x-resumable: true, has been forgotten, or its frontend has ended"
    if service.siblings is None and service.config.frontend.num_frontends > 1:
        reason += "; frontends that connect by TCP continue only their own streams"
    return StreamNotFound(f"there is no stream {stream_id[:128]!r} here: {reason}")
