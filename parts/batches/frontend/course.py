"""Runs one batch from its input file to its results. It continues from the database's state, so it may be interrupted.

validating ──▶ in_progress ──▶ finalizing ──▶ completed
    │ └──▶ failed    │              └──▶ expired, if the window is over
    └──────▶ cancelling ──▶ cancelled

From any of them but cancelling it fails if its input file is gone.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import structlog

from penstock.frontend.api.service import Service
from penstock.frontend.storage.database import StorageBusy, StorageFull
from penstock.parts.batches.frontend.answers import not_run
from penstock.parts.batches.frontend.files.store import FileStore, NewFile, whole
from penstock.parts.batches.frontend.lines import NumberedLine, check_lines, valid_lines
from penstock.parts.batches.frontend.shapes import BatchError, BatchErrors, Status
from penstock.parts.batches.frontend.store import BatchStore, LiveBatch

log = structlog.get_logger()

T = TypeVar("T")

RETRY_SECONDS = 5.0
"""Wait before the next try when the disk is full."""

_GONE = BatchError("input_file_missing", "the input file is no longer stored")
_UNCHECKED = BatchError("internal_error", "the server failed to check the input file")
_EXPIRED = "the request was not executed within the completion window"

Start = Callable[[LiveBatch, NumberedLine], Awaitable["asyncio.Task[tuple[bytes, bool]]"]]
"""Starts a line once there is room for it; the task returns its answer, and whether that is an error."""


class Course:
    """One batch of this process."""

    def __init__(self, service: Service, batches: BatchStore, files: FileStore, live: LiveBatch, start: Start) -> None:
        self._service = service
        self._batches = batches
        self._files = files
        self._live = live
        self._start = start
        self._path = files.path(live.batch.input_file_id)

    async def run(self) -> None:
        """Run the batch to its end."""
        status, number = self._live.batch.status, self._live.number
        if status == "cancelling":
            await self._end("cancelling", "cancelled")
            return
        if not await asyncio.to_thread(self._path.exists):
            await self._end(status, "failed", errors=BatchErrors([_GONE]))
            return
        if status == "validating" and not await self._validate():
            return
        if status != "finalizing":
            await self._answer_all()
            if not await self._batches.change(number, ["in_progress"], "finalizing"):
                return  # the batch was cancelled
        has_all = await self._write_missing()
        await self._end("finalizing", "completed" if has_all else "expired")

    async def _validate(self) -> bool:
        live, service = self._live, self._service
        names = service.names
        try:
            num_lines, errors = await asyncio.to_thread(
                check_lines, self._path, (live.batch.endpoint,), service.max_body_bytes, lambda name: name in names
            )
        except Exception:  # another try would most likely fail as well, and so on for ever
            log.exception("batch check failed", batch=live.batch.id)
            num_lines, errors = 0, [_UNCHECKED]
        if errors:
            await self._batches.change(live.number, ["validating"], "failed", errors=BatchErrors(errors))
            log.info("batch not valid", batch=live.batch.id, error=errors[0].message, line=errors[0].line)
            return False
        return await self._batches.change(live.number, ["validating"], "in_progress", num_lines=num_lines)

    async def _answer_all(self) -> None:
        """Answer the lines that have no answer yet, as many as the batch's window leaves time for."""
        live = self._live
        try:
            async with asyncio.timeout(max(0.0, live.batch.expires_at - time.time())), asyncio.TaskGroup() as tasks:
                async for line in self._missing():
                    tasks.create_task(self._keep(line, await self._start(live, line)))
        except TimeoutError:
            log.info("batch expired", batch=live.batch.id)

    async def _keep(self, line: NumberedLine, answer: asyncio.Task[tuple[bytes, bool]]) -> None:
        content, is_error = await answer
        await self._stored(partial(self._batches.put, self._live.number, line.number, content, is_error=is_error))

    async def _missing(self) -> AsyncIterator[NumberedLine]:
        answered = await self._batches.answered(self._live.number)
        lines = valid_lines(self._path)
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            if line.number not in answered:
                yield line

    async def _write_missing(self) -> bool:
        """Record an error for each line without an answer; return whether there were no such lines."""
        batch, has_all = self._live.batch, True
        async for line in self._missing():
            has_all = False
            content = not_run(batch.id, line.number, line.custom_id, "batch_expired", _EXPIRED)
            await self._stored(partial(self._batches.put, self._live.number, line.number, content, is_error=True))
        return has_all

    async def _end(self, before: Status, to: Status, **facts: Any) -> None:
        """Write the files, and hand them to the owner in the transaction in which the batch ends."""
        live, new = self._live, dict[str, NewFile]()
        after = live.batch.output_expires_after
        seconds = None if after is None else after.seconds
        try:
            for kind, are_errors in (("output", False), ("error", True)):
                if (written := await self._stored(partial(self._write_file, are_errors=are_errors))) is not None:
                    new[kind] = written

            def take(file: Any) -> dict[str, Any]:
                return {
                    f"{kind}_file_id": self._files.take(
                        file, each, live.owner, f"{live.batch.id}_{kind}.jsonl", "batch_output", seconds
                    ).id
                    for kind, each in new.items()
                }

            done = await self._stored(
                lambda: whole(self._batches.change(live.number, [before], to, also=take, **facts))
            )
            log.info("batch ended", batch=live.batch.id, status=to if done else "elsewhere")
        finally:
            for each in new.values():
                each.discard()

    async def _write_file(self, *, are_errors: bool) -> NewFile | None:
        """Write all answers of one kind; None if there are none."""
        new, last = await self._files.begin_output(), -1
        try:
            while page := await self._batches.answers(self._live.number, last, are_errors=are_errors):
                for last, content in page:  # noqa: B007
                    await new.write(content)
            await new.flush()
        except BaseException:
            new.discard()
            raise
        if not new.num_bytes:
            new.discard()
            return None
        return new

    async def _stored(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write something; if the disk is full, wait for room rather than lose what was computed."""
        while True:
            try:
                return await write()
            except (StorageFull, StorageBusy) as error:
                log.error("batch waiting", batch=self._live.batch.id, reason=error.message)
                await asyncio.sleep(RETRY_SECONDS)
