"""The streams of one frontend that outlive their connections, each under its owner and its id.

    POST with x-resumable ──answer──▶ handler in a task of its own ──▶ KeptStream ──▶ reader: this connection
    GET /v1/streams/{id}  ──find────▶ here, or at another frontend of the launch (`siblings.py`)

A live stream counts with all the bytes that it may take, an ended one with the bytes that it has. If there is no room
for a new stream, ended streams without a reader are dropped, the oldest first.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.frontend.errors import ApiError, InvalidRequest
from penstock.frontend.exchange.exchange import RESUMABLE_HEADER
from penstock.frontend.exchange.replies import Reply, RequestRecord, StreamReply
from penstock.frontend.streams.kept import Bounds, KeptStream

STREAM_HEADER = "x-penstock-stream"
"""The header with the path at which a stream can be continued."""

PATH = "/v1/streams/"

STOPPED = "the client has stopped it"

_RETRY_SECONDS = 5

_LOOK_AGAIN_SECONDS = 0.1


class StreamNotFound(InvalidRequest, status=404, code="stream_not_found"):
    """There is no stream with this id, or it is no longer kept."""


class StreamExists(InvalidRequest, status=409, code="stream_exists"):
    """A stream with this id is kept already."""


class StreamsFull(ApiError, status=429, type="rate_limit_error", code="streams_full"):
    """No more streams can be kept now."""


class StreamStopped(ApiError, status=499, code="stream_stopped"):
    """The client has stopped the stream."""


class StreamKeeper:
    """The kept streams; lives in a running event loop until `close`."""

    def __init__(self, max_bytes: int, bounds: Bounds) -> None:
        """Keeps at most `max_bytes` (0: keeps no streams); `bounds` limits each stream."""
        self.is_on = max_bytes > 0
        self._max_bytes = max(max_bytes, bounds.num_bytes)
        self._bounds = bounds
        self._streams: dict[tuple[str, str], KeptStream] = {}  # in the order in which they began

    def __len__(self) -> int:
        return len(self._streams)

    async def answer(
        self, record: RequestRecord, handling: Coroutine[None, None, Reply | StreamReply], ended: Callable[[], None]
    ) -> Reply | StreamReply:
        """See `exchange.replies.Keeper`.

        Raises:
            StreamExists: the owner already has a stream with the request's id.
            StreamsFull: there is no room for another stream.
            ApiError: raised by the handler.
        """
        if not self.is_on:
            record.warnings.append(f"{RESUMABLE_HEADER}: no effect, this server keeps no streams")
            return await handling
        try:
            kept = self._new(record.key_id, record.request_id)
        except ApiError:
            handling.close()
            raise
        record.is_kept = True
        work = asyncio.create_task(self._begin(kept, record, handling, ended))
        try:
            reply, record.is_kept = await asyncio.shield(work)
        except asyncio.CancelledError:  # the client has left, but a stream goes on
            work.add_done_callback(partial(_left_early, ended))
            _end_unless_stream(work, record)
            raise
        except Exception:
            record.is_kept = False
            raise
        if not record.is_kept:
            record.warnings.append(f"{RESUMABLE_HEADER}: no effect, the answer is not a stream")
        return reply

    async def _begin(
        self,
        kept: KeptStream,
        record: RequestRecord,
        handling: Coroutine[None, None, Reply | StreamReply],
        ended: Callable[[], None],
    ) -> tuple[Reply | StreamReply, bool]:
        """The answer for the client, and whether its work is kept."""
        try:
            reply = await handling
        except BaseException:
            kept.give_up()
            raise
        if isinstance(reply, StreamReply) and reply.background is None:
            return _begun(kept, record, reply, ended), True
        kept.give_up()
        return (self.detach(record, reply, ended), True) if isinstance(reply, StreamReply) else (reply, False)

    def detach(self, record: RequestRecord, reply: StreamReply, ended: Callable[[], None]) -> Reply | StreamReply:
        """See `exchange.replies.Keeper`.

        Raises:
            StreamsFull: there is no room for another stream; its work has been stopped.
        """
        if reply.background is None:
            return reply
        try:
            kept = self._new(record.key_id, reply.background.stream_id)
        except ApiError:
            reply.close()
            raise
        record.is_kept = True
        stream = _begun(kept, record, reply, ended)
        if reply.background.answer is None:
            return stream
        stream.close()
        return reply.background.answer

    def find(self, owner: str, stream_id: str) -> KeptStream | None:
        """The stream, if this frontend keeps it."""
        return self._streams.get((owner, stream_id))

    def _new(self, owner: str, stream_id: str) -> KeptStream:
        if (owner, stream_id) in self._streams:
            raise StreamExists(
                f"there is a stream {stream_id!r} already: continue it with GET /v1/streams/{stream_id}, or choose "
                "another x-request-id"
            )
        self._make_room(owner)
        kept = KeptStream(stream_id, owner, self._bounds, forget=self._forget)
        self._streams[owner, stream_id] = kept
        return kept

    def _make_room(self, owner: str) -> None:
        """Make room for one more stream: finished ones go first, and no API key gets more than half of what is left.

        So there is room for others, however many streams one key keeps.
        """
        most = self._bounds.num_bytes
        used = {True: 0, False: 0}  # by the owner, and by others
        for each in self._streams.values():
            used[each.owner == owner] += most if each.is_live else each.num_bytes
        finished = [each for each in self._streams.values() if not each.is_live]
        for each in sorted(finished, key=lambda each: each.owner != owner):
            if self._has_room(used, owner):
                break
            if each.owner != owner and sum(used.values()) + most <= self._max_bytes:
                break  # what it lacks is not what others hold
            used[each.owner == owner] -= each.num_bytes
            each.drop()
        if not self._has_room(used, owner):
            num_kept = sum(each.owner == owner for each in self._streams.values())
            raise StreamsFull(
                f"{num_kept} of your streams are kept, and no more fit into your part of --max-resumable-bytes",
                retry_after=_RETRY_SECONDS,
            )

    def _has_room(self, used: dict[bool, int], owner: str) -> bool:
        left = self._max_bytes - used[False]
        most = self._bounds.num_bytes
        share = max(most, left // 2) if owner else left  # without keys, all clients are one owner
        return used[True] + most <= min(share, left)

    def _forget(self, kept: KeptStream) -> None:
        if self._streams.get((kept.owner, kept.id)) is kept:
            del self._streams[kept.owner, kept.id]

    def close(self) -> None:
        """End all streams."""
        for kept in list(self._streams.values()):
            kept.drop()


def _begun(kept: KeptStream, record: RequestRecord, reply: StreamReply, ended: Callable[[], None]) -> StreamReply:
    """Keep the stream; return what its first reader gets."""

    def finish(is_complete: bool) -> None:
        if is_complete:
            record.status = 200
        ended()

    kept.begin(reply, finish)
    reader = kept.reader()
    return replace(reader, headers={**reader.headers, STREAM_HEADER: f"{PATH}{kept.id}"})


def _end_unless_stream(work: asyncio.Task[Any], record: RequestRecord) -> None:
    """End work that nobody waits for if its answer is not a stream; before it is submitted, nobody knows."""
    if record.asked is None and not work.done():
        asyncio.get_running_loop().call_later(_LOOK_AGAIN_SECONDS, _end_unless_stream, work, record)
    elif not record.is_stream:
        work.cancel()


def _left_early(ended: Callable[[], None], work: asyncio.Task[tuple[Reply | StreamReply, bool]]) -> None:
    """The handler has finished after its client left."""
    if work.cancelled() or work.exception() is not None:
        ended()
        return
    reply, is_kept = work.result()
    if isinstance(reply, StreamReply):
        reply.close()
    if not is_kept:
        ended()
