"""Runs the batches of a database, in one of the frontends that share it.

    idle ──▶ looks for live batches now and then
     ▲          │ there are some
     │          ▼
     │       has, or gets, the lease? ──▶ runs them, and renews it     no ──▶ looks again: its holder may die
     └────────── all have ended: gives it back

Lines go through the same handlers as requests, with the rights, limits and tenant of the key that made the batch. No
client waits for them, so the engine runs them last (`AddRequest.is_background`), half of each limit of a key stays free
for its other requests, and no more lines wait at the engine than will soon get rows. Random values and times in an
answer are derived from the batch and the line, so they are the same however often the line was restarted.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import structlog

from penstock.frontend.api.service import Service
from penstock.frontend.errors import ApiError
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.storage.database import Database
from penstock.parts.batches.frontend.course import Course
from penstock.parts.batches.frontend.files.handlers import files_of
from penstock.parts.batches.frontend.handlers import batches_of
from penstock.parts.batches.frontend.lines import NumberedLine
from penstock.parts.batches.frontend.metrics import BatchMetrics
from penstock.parts.batches.frontend.sender import Sender, has_room
from penstock.parts.batches.frontend.store import LiveBatch

log = structlog.get_logger()

LEASE = "batches"
LEASE_SECONDS = 6.0
MAX_OPEN = 256
"""Most lines in progress for each engine: as many as a large one has rows. What is open here is in memory."""

LOOK_SECONDS = 0.5
SWEEP_SECONDS = 600.0
FAILURE_SECONDS = 10.0
"""Wait before a batch that failed unexpectedly is tried again."""

_ROOM_SECONDS = 0.02
_START_SECONDS = 0.001  # between two lines, so that other requests' texts are read in between


class BatchRunner:
    """The runner of one frontend; lives in a running event loop until `close`."""

    def __init__(self, service: Service, database: Database, routes: Mapping[str, Route]) -> None:
        """`routes`: the endpoints that lines may be for."""
        self._service = service
        self._database = database
        self._batches = batches_of(service)
        self._files = files_of(service)
        self._name = secrets.token_hex(8)
        self._courses: dict[int, tuple[asyncio.Task[None], str]] = {}  # by the batch's number; its state at the start
        self._not_before: dict[int, float] = {}
        self._open: dict[asyncio.Task[Any], int] = {}  # lines in progress -> the numbers of their batches
        self._turns = asyncio.Lock()  # batches take turns at starting lines
        self._held_until = 0.0  # when the lease ends (`time.monotonic`)
        self._metrics = BatchMetrics(service.metrics.registry, lambda: len(self._open), lambda: len(self._courses))
        self._sender = Sender(service, routes, self._metrics.retries.inc)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; another frontend continues, or this one after its next start."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._stop_all()
        if self._held_until:
            with contextlib.suppress(ApiError):
                await self._database.give_back(LEASE, self._name)

    async def _run(self) -> None:
        swept_at = 0.0
        while True:
            try:
                if time.monotonic() - swept_at > SWEEP_SECONDS:
                    swept_at = time.monotonic()
                    await self._files.sweep()
                await self._look()
            except ApiError as error:  # the disk is full, or the database busy
                log.warning("batches not read", reason=error.message)
            except Exception:
                log.exception("batches not read")
            if self._held_until and time.monotonic() > self._held_until:  # another frontend may have the lease
                await self._stop_all()
                self._held_until = 0.0
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        """Start batches that should run, and stop those that should not."""
        live = await self._batches.live()
        if not live:
            if self._held_until:
                await self._stop_all()
                await self._database.give_back(LEASE, self._name)
                self._held_until = 0.0
            return
        now = time.monotonic()
        if self._held_until - now < 2 * LEASE_SECONDS / 3:
            if not await self._database.lease(LEASE, self._name, LEASE_SECONDS):
                await self._stop_all()
                self._held_until = 0.0
                return
            self._held_until = now + LEASE_SECONDS
        for each in live:
            known = self._courses.get(each.number)
            if known is not None and each.batch.status == "cancelling" != known[1]:
                await self._stop(each.number)
                known = None
            if known is None and self._not_before.get(each.number, 0.0) <= now:
                course = Course(self._service, self._batches, self._files, each, self._start)
                task = asyncio.create_task(course.run())
                self._courses[each.number] = task, each.batch.status
                task.add_done_callback(partial(self._ended, each.number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._courses.get(number, (None,))[0] is task:
            del self._courses[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch interrupted, retrying", exc_info=error)
            self._not_before[number] = time.monotonic() + FAILURE_SECONDS

    async def _stop(self, number: int) -> None:
        if (found := self._courses.pop(number, None)) is not None:  # it may have ended while others were stopped
            task, _ = found
            task.cancel()
            await asyncio.wait([task])
        if lines := [line for line, batch in self._open.items() if batch == number]:
            for line in lines:
                line.cancel()
            await asyncio.wait(lines)

    async def _stop_all(self) -> None:
        for number in list(self._courses):
            await self._stop(number)

    async def _start(self, live: LiveBatch, line: NumberedLine) -> asyncio.Task[tuple[bytes, bool]]:
        while not self._key_has_spare(live.owner):  # noqa: ASYNC110  (it drains with time)
            await asyncio.sleep(_ROOM_SECONDS)
        async with self._turns:  # in the order in which they ask
            await asyncio.sleep(_START_SECONDS)
            most = MAX_OPEN * len(self._service.engine.links)
            while not has_room(self._service, len(self._open), most):  # noqa: ASYNC110  (the engine tells it a few times a second)
                await asyncio.sleep(_ROOM_SECONDS)
            task = asyncio.create_task(self._answer(live, line))
            self._open[task] = live.number
            task.add_done_callback(self._open.pop)
        return task

    def _key_has_spare(self, owner: str) -> bool:
        if not self._service.access.has_keys:
            return True
        try:
            return self._service.access.of(owner, "infer").has_spare
        except ApiError:
            return True  # the key is gone: let the lines be refused

    async def _answer(self, live: LiveBatch, line: NumberedLine) -> tuple[bytes, bool]:
        batch = live.batch
        content, is_error = await self._sender.answer(batch.id, batch.created_at, line, live.owner, live.tenant)
        self._metrics.answered.labels("failed" if is_error else "completed").inc()
        return content, is_error
