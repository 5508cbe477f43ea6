"""`penstock serve`: start all processes, restart those that die, and end them in the right order.

    start        scheduler, worker, frontends, all at once; they find each other in any order
    a death      the process is restarted; its peers say hello again
    hanging      a process that has been silent for too long, or a worker that the scheduler reports as hung, is
                 killed, which is a death; so are scheduler and worker together if each is well but they do not
                 find each other
    SIGTERM      frontends drain (running streams finish, whatever dies meanwhile), then scheduler and worker end;
                 exit 0; a second one (or Ctrl-C) does not wait for the streams
    SIGHUP       frontends read the key file and the certificate again, if there are any
    giving up    a process that rejects its configuration (exit code 2), or that dies too often (`child.py`),
                 ends everything with a nonzero code; so does an error in this process

Children end with this process (the kernel signals them), so there are no orphans.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path

import msgspec
import structlog

from penstock.core.config import Config, ConfigError
from penstock.core.config.addresses import with_addresses
from penstock.core.config.listening import addresses, bind, has_files
from penstock.core.config.ranks import Rank
from penstock.core.launch.banner import Banner
from penstock.core.launch.child import Child
from penstock.core.launch.spare import adopt_orphans, reap_strangers
from penstock.ipc import process
from penstock.ipc.addresses import private_dir

log = structlog.get_logger()

_SPARE_WORKER = "penstock.gpu_worker.startup.spare"

_END_GRACE = 5.0  # seconds between SIGTERM (after draining) and SIGKILL

_PATIENCE, _MORE_PATIENCE = 1, 3
"""Heartbeat timeouts for which a process may be silent. If a frontend ends, so do its clients' connections; and the
scheduler judges workers by their results, so this is only a second check."""

_APART = 2
"""Heartbeat timeouts within which a scheduler without a worker and a ready worker must find each other."""


class Supervisor:
    """All children of one launch. It runs in any thread's event loop: the caller handles signals and orphans.

    A worker's spare forks workers that become children of this process only if it adopts orphans (`adopt_orphans`): a
    program that does not do so must set `spare_worker` to false.
    """

    def __init__(self, config: Config, num_ranks: int = 1, *, has_frontends: bool = True) -> None:
        """`num_ranks`: workers that hold the model together; they start and end as one.

        Without frontends the launch serves a program that acts as one.
        """
        self._config = config
        frontends = range(config.frontend.num_frontends if has_frontends else 0)
        # Frontends share their metrics in memory that outlives each of them.
        shared = {"--metrics-fd": os.memfd_create("penstock-metrics")} if len(frontends) > 1 else {}
        self.frontends = [
            Child(f"penstock-frontend-{i}", "penstock.frontend", config, "--index", str(i), shared_fds=shared)
            for i in frontends
        ]
        self._scheduler = Child("penstock-scheduler", "penstock.core", config)
        spare = _SPARE_WORKER if config.worker.spare_worker else ""
        self._workers = [
            Child(rank.name, "penstock.gpu_worker", rank.share(config), *rank.arguments, spare=spare)
            for rank in (Rank(number, num_ranks) for number in range(num_ranks))
        ]
        self.engine = [self._scheduler, *self._workers]
        self._scheduler.on_hung = self._kill_hung
        self._seconds_apart = 0.0
        self.exit_code = 0
        self.stopping = asyncio.Event()
        """Everything is about to end, on request or because of a failure."""
        self._hurry = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    @property
    def pids(self) -> set[int]:
        """Of all processes and spares."""
        return {pid for child in (*self.engine, *self.frontends) for pid in child.pids}

    async def run(self) -> int:
        """Run until `stop` or a fatal failure; return the exit code for the whole launch."""
        of_frontends = [self._vital(self._keep_running(child)) for child in self.frontends]
        of_engine = [self._vital(self._keep_running(*group)) for group in ([self._scheduler], self._workers)]
        of_engine.append(self._vital(self._watch()))
        await self.stopping.wait()
        await _cancel([*self._reloads, *of_frontends])
        # A worker or scheduler that dies now is still replaced, so that streams can finish.
        await self._end(self.frontends, self._config.frontend.shutdown_timeout + _END_GRACE)
        await _cancel(of_engine)
        for child in self.engine:
            await child.end_spare()
        await self._end(self.engine, _END_GRACE)
        log.info("stopped", exit_code=self.exit_code)
        return self.exit_code

    def stop(self) -> None:
        """Let streams finish, then end everything; the second call does not wait for streams."""
        if self.stopping.is_set():
            self._hurry.set()
        self.stopping.set()

    def reload(self) -> None:
        """Let the frontends read the key file and the certificate again."""
        if not has_files(self._config.frontend):
            log.info("nothing to reload: no key file, no certificate")
            return
        for child in self.frontends:
            task = asyncio.create_task(self._let_reload(child))
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    async def _let_reload(self, child: Child) -> None:
        await child.is_ready.wait()  # before that, the signal could end it
        child.signal(signal.SIGHUP)

    def _vital(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """A task without which nothing would be restarted any more: if it fails, everything ends."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_vital_end)
        return task

    def _on_vital_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.exit_code = 1
            self.stopping.set()
            log.error("internal error, giving up", exc_info=error)

    async def _keep_running(self, *group: Child) -> None:
        """Start the processes of a group, and start all of them again when one has ended."""
        while True:
            await asyncio.gather(*(child.start() for child in group))
            child, code = await _first_end(group)
            if self.stopping.is_set() and code == 0:  # a signal to all processes reached it too
                return
            is_hopeless = code == process.EXIT_CONFIG  # it has printed the reason
            if is_hopeless or not child.may_restart(time.monotonic()):
                (log.info if is_hopeless else log.error)("giving up", child=child.name, exit_code=code)
                self.exit_code = process.EXIT_CONFIG if is_hopeless else 1
                self.stopping.set()
                return
            log.error("died, restarting it", child=child.name, exit_code=code)

    def _kill_hung(self, pid: int) -> None:
        """Kill a worker that the scheduler reports as hung, unless it has been replaced in the meantime."""
        for child in self._workers:
            running = child.process
            if running is not None and running.pid == pid and running.returncode is None:
                log.error("hangs, killing it", child=child.name)
                child.signal(signal.SIGKILL)

    async def _watch(self) -> None:
        """Check all children by their reports, for as long as this runs."""
        options = self._config.ipc
        interval, timeout = options.heartbeat_interval, options.heartbeat_timeout
        while True:
            await asyncio.sleep(interval)
            for child in (*self.engine, *self.frontends):
                patience = _PATIENCE if child is self._scheduler else _MORE_PATIENCE
                if child.silent_for(interval) > patience * timeout:
                    log.error("is silent, killing it", child=child.name)
                    child.signal(signal.SIGKILL)
            is_apart = self._scheduler.is_alone and all(child.is_ready.is_set() for child in self._workers)
            self._seconds_apart = self._seconds_apart + interval if is_apart else 0.0
            if self._seconds_apart > _APART * timeout:
                log.error("scheduler and workers do not find each other, killing all")
                for child in self.engine:
                    child.signal(signal.SIGKILL)
                self._seconds_apart = 0.0

    async def _end(self, children: list[Child], grace: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.ended()) for child in children if child.process is not None]
        hurry = asyncio.create_task(self._hurry.wait())
        late: set[asyncio.Task[int]] = set(waits)
        deadline = time.monotonic() + grace
        while late and not self._hurry.is_set() and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait([*late, hurry], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            late = {wait for wait in late if not wait.done()}
        hurry.cancel()
        if late:
            for child in children:
                child.signal(signal.SIGKILL)
            await asyncio.wait(late)


async def _first_end(group: Sequence[Child]) -> tuple[Child, int]:
    """Wait until one of the processes has ended, and end the others; return which one it was, and its exit code.

    If another one rejects the configuration at the same moment, that comes first.
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


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def reserve_ports(config: Config) -> tuple[Config, list[socket.socket]]:
    """Make sure that the ports are free, and choose one for port 0, before anything is loaded.

    With several frontends the bound (never listening) sockets are returned; they must stay open so that
    no other program takes the ports between the frontends' starts.

    Raises:
        ConfigError: if an address cannot be bound.
    """
    options = config.frontend
    ports, kept = [], []
    for host, port in addresses(options):
        try:
            with bind(host, port, is_shared=False) as alone:  # a shared bind would succeed beside another server
                ports.append(alone.getsockname()[1])
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        if options.num_frontends > 1:
            kept.append(bind(host, ports[-1], is_shared=True))
    return msgspec.structs.replace(config, frontend=msgspec.structs.replace(options, port=ports[0])), kept


def _quiet_on_terminal(config: Config) -> Config:
    """On a terminal people read the banner; log lines of several processes would run through it."""
    options = config.log
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and options.log_format != "json"
    if options.log_level != "auto" or not is_terminal:
        return config
    return msgspec.structs.replace(config, log=msgspec.structs.replace(options, log_level="warning"))


async def _run_process(config: Config) -> int:
    """Run a supervisor that has this process for itself: with signals, orphans, and a banner."""
    supervisor, loop = Supervisor(config), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    process.on_hangup(loop, supervisor.reload)
    adopt_orphans()
    banner = Banner(config)
    banner.begin()
    show, reaper = (
        asyncio.create_task(_show(supervisor, banner)),
        asyncio.create_task(_keep_reaping(supervisor, config)),
    )
    try:
        return await supervisor.run()
    finally:
        supervisor.stopping.set()
        await show
        await _cancel([reaper])


async def _show(supervisor: Supervisor, banner: Banner) -> None:
    announce = asyncio.create_task(banner.announce([child.is_ready for child in supervisor.frontends]))
    await supervisor.stopping.wait()
    await _cancel([announce])
    if not supervisor.exit_code:
        banner.ending()
    banner.close()


async def _keep_reaping(supervisor: Supervisor, config: Config) -> None:
    while True:
        await asyncio.sleep(config.ipc.heartbeat_interval)
        reap_strangers(supervisor.pids)


def serve(config: Config) -> int:
    """Run `penstock serve` to its end; return the exit code."""
    config = _quiet_on_terminal(config)
    process.begin("penstock-supervisor", config.log.log_level, config.log.log_format)
    config, kept = reserve_ports(config)
    try:
        with private_dir(config.ipc.runtime_dir) as folder:
            return asyncio.run(_run_process(with_addresses(config, Path(folder))))
    finally:
        for shared in kept:
            shared.close()
