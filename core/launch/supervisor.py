"""`penstock serve`: start all processes, restart those that die, and end them in the right order.

    start        engines (`engine.py`) and frontends, all at once; they find each other in any order
    a death      the process is restarted; its peers say hello again
    hanging      a process that has been silent for too long is killed, which is a death
    SIGTERM      frontends drain (running streams finish, whatever dies meanwhile), then scheduler and worker end;
                 exit 0; a second signal (or Ctrl-C, or SIGQUIT) ends the streams with an error
    SIGHUP       frontends read the key file and the certificate again, if there are any
    giving up    a frontend that rejects its configuration (exit code 2), or dies too often (`child.py`), ends
                 everything with a nonzero code; so do the last engine, an engine that rejects its configuration from
                 the start, and an error in this process

Children end with this process (the kernel signals them), so there are no orphans.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path

import msgspec
import structlog

from penstock.config import Config, ConfigError
from penstock.config.listening import addresses, bind, has_files
from penstock.core.launch.banner import Banner
from penstock.core.launch.child import Child
from penstock.core.launch.engine import END_GRACE, MORE_PATIENCE, EngineLaunch, cancel, end_all, keep_running
from penstock.core.launch.kept_files import with_kept_files
from penstock.core.launch.launchers import addressed
from penstock.core.launch.spare import Owner, Spare, adopt_orphans, reap_strangers
from penstock.ipc import process, shared_files
from penstock.ipc.addresses import private_dir

log = structlog.get_logger()

_SPARE_WORKER = "penstock.gpu_worker.startup.spare"


class Supervisor:
    """All child processes of one launch. Runs in the event loop of any thread; the caller handles signals and orphans.

    Workers that the spare forks become children of this process only if it adopts orphans (`adopt_orphans`). A program
    that does not adopt them must set `spare_worker` to false.
    """

    def __init__(self, config: Config, num_ranks: int = 0, *, has_frontends: bool = True) -> None:
        """
        Args:
            config: with addresses.
            num_ranks: workers that start and end as one; 0: as many as the options ask for.
            has_frontends: False: the launch serves a program that acts as a frontend.
        """
        self._config = config
        frontends = range(config.frontend.num_frontends if has_frontends else 0)
        # Frontends share their metrics in memory that outlives each of them.
        shared = {"--metrics-fd": os.memfd_create("penstock-metrics")} if len(frontends) > 1 else {}
        self.frontends = [
            Child(f"penstock-frontend-{i}", "penstock.frontend", config, "--index", str(i), shared_fds=shared)
            for i in frontends
        ]
        has_spare = config.worker.spare_worker and config.parallel.launcher == "local"
        self._spare = Spare(_SPARE_WORKER, config) if has_spare else None
        self.engines = [
            EngineLaunch(config, number, num_ranks or config.parallel.num_ranks, self._spare)
            for number in range(config.parallel.data_parallel_size)
        ]
        self.exit_code = 0
        self.stopping = asyncio.Event()
        """Set when everything is about to end, on request or because of a failure."""
        self._hurry = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    @property
    def children(self) -> list[Child]:
        """All processes that should run."""
        return [child for engine in self.engines for child in engine.children] + self.frontends

    @property
    def owners(self) -> list[Owner]:
        """Who waits for the processes of this launch."""
        return [*self.children, *([] if self._spare is None else [self._spare])]

    async def run(self) -> int:
        """Run until `stop` or a fatal failure; return the exit code for the whole launch."""
        of_frontends = [self._vital(self._keep_frontend(child)) for child in self.frontends]
        of_engines = [self._vital(self._keep_engine(engine)) for engine in self.engines]
        of_engines.append(self._vital(self._watch()))
        await self.stopping.wait()
        await cancel([*self._reloads, *of_frontends])
        # A worker or scheduler that dies now is still replaced, so that streams can finish.
        await end_all(self.frontends, self._config.frontend.shutdown_timeout + END_GRACE, self._hurry, END_GRACE)
        await cancel(of_engines)
        if self._spare is not None:
            await self._spare.end()
        await asyncio.gather(*(engine.end(self._hurry) for engine in self.engines))
        shared_files.clear_leftovers()
        log.info("server stopped", exit_code=self.exit_code)
        return self.exit_code

    def stop(self) -> None:
        """Let streams finish, then end everything; the second call does not wait for streams."""
        if self.stopping.is_set():
            self._hurry.set()
        self.stopping.set()

    def reload(self) -> None:
        """Let the frontends read the key file and the certificate, and open the access log, again."""
        if not has_files(self._config.frontend):
            log.info("nothing to reload: no key file, no certificate, no access log")
            return
        for child in self.frontends:
            task = asyncio.create_task(self._let_reload(child))
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    async def _let_reload(self, child: Child) -> None:
        await child.is_ready.wait()  # until then, the signal could end it
        child.signal(signal.SIGHUP)

    def _vital(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Start a task without which dead processes would no longer be restarted: if it fails, everything ends."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_vital_end)
        return task

    def _on_vital_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.exit_code = 1
            self.stopping.set()
            log.error("internal error, giving up", exc_info=error)

    async def _keep_frontend(self, child: Child) -> None:
        code = await keep_running(self.stopping, child)
        if code is not None:
            self._give_up(code)

    async def _keep_engine(self, engine: EngineLaunch) -> None:
        """Keep an engine running; if it ends, the others go on.

        An engine whose configuration never worked ends the launch, so that the user notices.
        """
        code = await engine.run(self.stopping)
        if code is None:
            return
        engine.is_given_up = True
        is_wrong = code == process.EXIT_CONFIG and not engine.has_been_ready
        if is_wrong or all(each.is_given_up for each in self.engines):
            self._give_up(code)
            return
        await engine.end(self._hurry)
        log.error("engine given up", engine=engine.number)

    def _give_up(self, code: int) -> None:
        self.exit_code = code
        self.stopping.set()

    async def _watch(self) -> None:
        """Check all processes by their reports, and remove files that dead ones left, for as long as this runs."""
        options = self._config.ipc
        while True:
            shared_files.clear_leftovers()  # also those of an earlier launch
            await asyncio.sleep(options.heartbeat_interval)
            for engine in self.engines:
                engine.watch(options.heartbeat_interval)
            for child in self.frontends:
                child.kill_if_silent(options.heartbeat_interval, MORE_PATIENCE * options.heartbeat_timeout)


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
    """Log less on a terminal: log lines of several processes would run through the banner."""
    options = config.log
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and options.log_format != "json"
    if options.log_level != "auto" or not is_terminal:
        return config
    return msgspec.structs.replace(config, log=msgspec.structs.replace(options, log_level="warning"))


async def _run_process(config: Config) -> int:
    """Run a supervisor that owns this process: with signals, orphans, and a banner."""
    supervisor, loop = Supervisor(config), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
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
        await cancel([reaper])


async def _show(supervisor: Supervisor, banner: Banner) -> None:
    announce = asyncio.create_task(banner.announce([child.is_ready for child in supervisor.frontends]))
    await supervisor.stopping.wait()
    await cancel([announce])
    if not supervisor.exit_code:
        banner.ending()
    banner.close()


async def _keep_reaping(supervisor: Supervisor, config: Config) -> None:
    while True:
        await asyncio.sleep(config.ipc.heartbeat_interval)
        reap_strangers(supervisor.owners)


def serve(config: Config) -> int:
    """Run `penstock serve` to its end; return the exit code."""
    config = _quiet_on_terminal(config)
    process.begin("penstock-supervisor", config.log.log_level, config.log.log_format)
    config, kept = reserve_ports(config)
    try:
        with private_dir(config.ipc.runtime_dir) as folder:
            config = with_kept_files(config, Path(folder))
            return asyncio.run(_run_process(addressed(config, Path(folder))))
    finally:
        for shared in kept:
            shared.close()
