"""The processes of one engine: its scheduler, and the ranks of its group.

a death      restarts the scheduler alone, or all ranks together
hanging      a scheduler or rank that has been silent for too long, or a rank that the scheduler reports as hung, is
             killed, which is a death; all are killed if each is alive but they do not find each other
giving up    a process rejects its configuration (exit code 2), or dies too often (`child.py`)
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

import structlog

from penstock.config import Config
from penstock.config.addresses import clear_rendezvous
from penstock.config.engines import numbered, of_engine
from penstock.config.ranks import Rank
from penstock.core.launch import launchers
from penstock.core.launch.child import Child
from penstock.core.launch.spare import Spare
from penstock.ipc import process

log = structlog.get_logger()

END_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_WRITE_GRACE = 10.0  # seconds to write the remaining KV pages to the disk

PATIENCE, MORE_PATIENCE = 1, 3
"""Heartbeat timeouts for which a process may be silent. For workers this is only a second check: the scheduler judges
them by their results."""

_APART = 2
"""Heartbeat timeouts within which a scheduler without a worker and a ready worker must find each other."""


class EngineLaunch:
    """The processes of one engine, which start, restart and end as one."""

    def __init__(self, config: Config, number: int, num_ranks: int, spare: Spare | None) -> None:
        """`config`: that of the whole launch, with an address for each engine."""
        num_engines = config.parallel.data_parallel_size
        self.number = number
        self.config = of_engine(config, number)
        self.has_been_ready = self.is_given_up = False
        ranks = [Rank(rank, num_ranks, number, num_engines) for rank in range(num_ranks)]
        scheduler = numbered("penstock-scheduler", number, num_engines)
        self.scheduler = Child(scheduler, "penstock.core", self.config, "--name", scheduler)
        self.workers = launchers.workers(self.config, ranks, spare)
        self.children = [self.scheduler, *self.workers]
        self.scheduler.on_hung = self.kill_hung
        self._is_to_restart = asyncio.Event()
        self.scheduler.on_restart = self._is_to_restart.set
        self._seconds_apart = 0.0

    async def run(self, stopping: asyncio.Event) -> int | None:
        """Keep all processes running; return the exit code with which the engine was given up.

        None: its processes have ended by themselves because everything is about to end (`stopping`).
        """
        while True:
            ended = asyncio.create_task(self._run(stopping))
            asked = asyncio.create_task(self._is_to_restart.wait())
            try:
                await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    return ended.result()
            finally:
                await cancel([ended, asked])
            log.info("engine restarting", scheduler=self.scheduler.name)
            await self.end(stopping)
            self._is_to_restart.clear()

    async def _run(self, stopping: asyncio.Event) -> int | None:
        keepers = [
            asyncio.create_task(keep_running(stopping, self.scheduler)),
            asyncio.create_task(keep_running(stopping, *self.workers, before_start=self._clear_rendezvous)),
        ]
        try:
            while True:
                done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
                codes = [code for keeper in done if (code := keeper.result()) is not None]
                if codes:
                    return max(codes)
                if len(done) == len(keepers):
                    return None
                keepers = [keeper for keeper in keepers if keeper not in done]
        finally:
            await cancel(keepers)

    def _clear_rendezvous(self) -> None:
        """Remove the rendezvous files of earlier ranks, which new ones must not find."""
        clear_rendezvous(self.config)

    def kill_hung(self, pid: int) -> None:
        """Kill a worker that the scheduler reports as hung, unless it has been replaced in the meantime.

        A worker that is killed closes its connections before its parent learns of its death, and the scheduler may
        be the first to notice: it does not hang, and its end tells why it died.
        """
        for child in self.workers:
            running = child.process
            if running is not None and running.pid == pid and running.returncode is None and not child.is_ending:
                log.error("process unresponsive, killing", child=child.name)
                child.signal(signal.SIGKILL)

    def watch(self, interval: float) -> None:
        """Check the processes by their reports; called every `interval` seconds."""
        timeout = self.config.ipc.heartbeat_timeout
        self.has_been_ready |= all(child.is_ready.is_set() for child in self.children)
        for child in self.children:
            child.kill_if_silent(interval, (PATIENCE if child is self.scheduler else MORE_PATIENCE) * timeout)
        is_apart = self.scheduler.is_alone and all(child.is_ready.is_set() for child in self.workers)
        self._seconds_apart = self._seconds_apart + interval if is_apart else 0.0
        if self._seconds_apart > _APART * timeout:
            log.error("scheduler and workers disconnected, killing", scheduler=self.scheduler.name)
            for child in self.children:
                child.signal(signal.SIGKILL)
            self._seconds_apart = 0.0

    async def end(self, hurry: asyncio.Event) -> None:
        """End all processes, without waiting for anything once `hurry` is set."""
        if any(options.writes_at_end for options in self.config.of_parts()):
            await end_all([self.scheduler], END_GRACE + _WRITE_GRACE, hurry)
        await end_all(self.children, END_GRACE, hurry)


async def keep_running(
    stopping: asyncio.Event, *group: Child, before_start: Callable[[], None] = lambda: None
) -> int | None:
    """Start the processes of a group, and restart all of them when one has ended.

    Returns the exit code with which it was given up; None if it ended by itself once `stopping` was set.
    """
    while True:
        before_start()
        await asyncio.gather(*(child.start() for child in group))
        child, code = await _first_end(group)
        if stopping.is_set() and code == 0:  # it also got a signal that was sent to all processes
            return None
        is_hopeless = code == process.EXIT_CONFIG  # it has printed the reason
        if is_hopeless or not child.may_restart(time.monotonic()):
            (log.info if is_hopeless else log.error)("giving up", child=child.name, exit_code=code, **_by_signal(code))
            return process.EXIT_CONFIG if is_hopeless else 1
        log.error("process exited, restarting", child=child.name, exit_code=code, **_by_signal(code))


def _by_signal(code: int) -> dict[str, str]:
    """The signal that ended a process, for the log; nothing if it ended by itself."""
    return {"signal": signal.Signals(-code).name} if -code in set(signal.Signals) else {}


async def _first_end(group: Sequence[Child]) -> tuple[Child, int]:
    """Wait until one of the processes has ended, and end the others; return that process and its exit code.

    A process that rejects the configuration at the same moment takes precedence.
    """
    ends = [asyncio.create_task(child.ended()) for child in group]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        first = next(i for i, end in enumerate(ends) if end.done())
        for child in group:
            child.signal(signal.SIGKILL)
        codes = await asyncio.gather(*ends)
    finally:
        for end in ends:
            end.cancel()
    return group[first], process.EXIT_CONFIG if process.EXIT_CONFIG in codes else codes[first]


async def end_all(children: Sequence[Child], grace: float, hurry: asyncio.Event, goodbye: float = 0.0) -> None:
    """Ask processes to end, and kill those that have not done so after `grace` seconds, or when `hurry` is set.

    `goodbye`: seconds after `hurry` in which they may still tell their clients that they end; they are asked again.
    """
    for child in children:
        child.signal(signal.SIGTERM)
    waits = [asyncio.create_task(child.ended()) for child in children if child.process is not None]
    hurrying = asyncio.create_task(hurry.wait())
    late: set[asyncio.Task[int]] = set(waits)
    deadline = time.monotonic() + grace
    while late and not hurry.is_set() and (left := deadline - time.monotonic()) > 0:
        await asyncio.wait([*late, hurrying], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        late = {wait for wait in late if not wait.done()}
    hurrying.cancel()
    if late and hurry.is_set() and goodbye:
        for child in children:
            child.signal(signal.SIGTERM)
        late = (await asyncio.wait(late, timeout=goodbye))[1]
    if late:
        for child in children:
            child.signal(signal.SIGKILL)
        await asyncio.wait(late)


async def cancel(tasks: Sequence["asyncio.Task[object]"]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
