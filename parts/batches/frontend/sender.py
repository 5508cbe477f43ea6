"""Sends the lines of batches through the handlers of their endpoints, until each has a final answer."""

import asyncio
from collections.abc import Callable, Mapping
from random import Random

from penstock.frontend.api.service import Service
from penstock.frontend.draws_and_clock import CLOCK, DRAWS
from penstock.frontend.errors import RouteNotFound
from penstock.frontend.exchange.exchange import Exchange, Request, Route
from penstock.frontend.exchange.replies import JSON, Reply, RequestRecord
from penstock.parts.batches.frontend.answers import answered, request_id
from penstock.parts.batches.frontend.lines import NumberedLine

MAX_WAITING = 8
"""If this many requests wait at the engine, no more are sent."""

RETRY_SECONDS = (0.5, 30.0)
_MAX_TRIES = 3  # for a line on which the server fails
_NOW_AND_THEN = (429, 503)  # statuses of requests that only came at a bad time, and are retried without limit
_MAY_PASS = (500, 504)


def has_room(service: Service, num_open: int, most: int) -> bool:
    """Whether the engine will soon have a row for one more line, if `num_open` of at most `most` are in progress."""
    told = service.engine.queue.stats
    if not told or service.engine.facts is None or service.generations.is_draining:
        return False
    num_rows = sum(each.num_rows for each in told)
    num_waiting = sum(each.num_waiting for each in told)
    return num_open < min(most, num_rows + MAX_WAITING) and num_waiting <= MAX_WAITING


class Sender:
    """Sends the lines of one process, each in a task of its own."""

    def __init__(self, service: Service, routes: Mapping[str, Route], on_retry: Callable[[], object]) -> None:
        """`routes`: the endpoints, by their paths. `on_retry` is called when a line is sent again."""
        self._exchange = Exchange(service, service.access, service.metrics, 0.0)
        self._routes = routes
        self._on_retry = on_retry

    async def answer(
        self, batch_id: str, created: int, line: NumberedLine, owner: str, tenant: str
    ) -> tuple[bytes, bool]:
        """The line's answer, as it is written into a file, and whether it is an error.

        Random values and times in the answer are derived from `batch_id`, the line's number and `created`.
        """
        name, pause, num_tries = request_id(batch_id, line.number), RETRY_SECONDS[0], 0
        while True:
            DRAWS.set(Random(name))
            CLOCK.set(lambda: created)
            num_tries += 1
            reply = await self._send(line, name, owner, tenant)
            is_passing = reply.status in _NOW_AND_THEN or (reply.status in _MAY_PASS and num_tries < _MAX_TRIES)
            if not is_passing or reply.headers.get("x-should-retry") == "false":
                return answered(batch_id, line.number, line.custom_id, reply), reply.status >= 400
            self._on_retry()
            await asyncio.sleep(min(max(pause, float(reply.headers.get("Retry-After", 0))), RETRY_SECONDS[1]))
            pause = min(2 * pause, RETRY_SECONDS[1])

    async def _send(self, line: NumberedLine, name: str, owner: str, tenant: str) -> Reply:
        async def body() -> bytes:
            return line.body

        request = Request({"x-request-id": [name], "content-type": [JSON]}, body, remote=tenant, key_id=owner)
        route = self._routes.get(line.url) or Route("POST", line.url, _gone)
        async with self._exchange.answer(route, request) as reply:
            if not isinstance(reply, Reply):
                raise TypeError("a line of a batch is answered with a stream")
            return reply


async def _gone(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """The handler of endpoints that the server had when the batch was made."""
    raise RouteNotFound("the server no longer has this endpoint")
