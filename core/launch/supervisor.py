"""`penstock serve`: start all processes, restart what dies, end them in the right order.

    start        scheduler, worker, frontends, all at once; they find each other in any order
    a death      the process is started again; its peers say hello anew
    hanging      a process that has not said for too long that it is alive, and a worker of which the scheduler
                 tells that it does not answer, is killed, which is a death; so are scheduler and worker both
                 if each is well but they do not find each other
    SIGTERM      frontends drain (running streams finish, whatever dies meanwhile), then scheduler and worker end;
                 exit 0; a second one (or Ctrl-C) does not wait for the streams
    SIGHUP       frontends read the files of keys and certificate again, if there are any
    giving up    a process that refuses its configuration (exit code 2), or that dies too often (`child.py`),
                 ends everything with a non-zero code; so does an error in here

Children end with this process (the kernel signals them), so there are no orphans.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

import msgspec
import structlog

from penstock.core.config import Config, ConfigError
from penstock.core.config.addresses import with_addresses
from penstock.core.config.listening import addresses, bind, has_files
from penstock.core.launch.banner import Banner
from penstock.core.launch.child import Child
from penstock.core.launch.spare import adopt_orphans, reap_strangers
from penstock.ipc import process
from penstock.ipc.addresses import private_dir

log = structlog.get_logger()

EXIT_CONFIG = 2
"""A child's exit code for a configuration that cannot work: starting it again would not help."""

_END_GRACE = 5.0  # seconds between SIGTERM (after draining) and SIGKILL

_PATIENCE, _MORE_PATIENCE = 1, 3
"""Heartbeat timeouts that a process may be silent. With a frontend its clients' connections end; and of a worker the
scheduler judges by its results, so that this is only a second look at it."""

_APART = 2
"""Heartbeat timeouts that a scheduler without a worker and a worker that is ready may take to meet."""


class Supervisor:
    """All children of one launch."""

    def __init__(self, config: Config) -> None:
        self._config = config
        frontends = range(config.frontend.num_frontends)
        # Frontends share their metrics in memory that outlives each of them.
        shared = {"--metrics-fd": os.memfd_create("penstock-metrics")} if len(frontends) > 1 else {}
        self._frontends = [
            Child(f"penstock-frontend-{i}", "penstock.frontend", config, i, shared_fds=shared) for i in frontends
        ]
        self._engine = [
            Child("penstock-scheduler", "penstock.core", config),
            Child("penstock-worker-0", "penstock.gpu_worker", config, has_spare=config.worker.spare_worker),
        ]
        self._scheduler, self._worker = self._engine
        self._scheduler.on_hung = self._kill_hung
        self._seconds_apart = 0.0
        self._exit_code = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run until a signal or a hopeless failure; the exit code for the whole launch."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        process.on_hangup(loop, self._on_hangup)
        adopt_orphans()
        banner = Banner(self._config)
        banner.begin()
        children = self._engine + self._frontends
        watchers = {child: self._vital(self._keep_running(child)) for child in children}
        watch = self._vital(self._watch())
        announce = asyncio.create_task(banner.announce([child.is_ready for child in self._frontends]))
        await self._stop.wait()
        await _cancel([announce, *self._reloads, *(watchers[child] for child in self._frontends)])
        if not self._exit_code:
            banner.ending()
        banner.close()
        # A worker or scheduler that dies now is still replaced: streams are to finish.
        await self._end(self._frontends, self._config.frontend.shutdown_timeout + _END_GRACE)
        await _cancel([watch, *(watchers[child] for child in self._engine)])
        for child in self._engine:
            await child.end_spare()
        await self._end(self._engine, _END_GRACE)
        log.info("stopped", exit_code=self._exit_code)
        return self._exit_code

    def _vital(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """A task without which nothing is restarted any more: if it fails, everything ends."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_vital_end)
        return task

    def _on_vital_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._exit_code = 1
            self._stop.set()
            log.error("internal error, giving up", exc_info=error)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _on_hangup(self) -> None:
        if not has_files(self._config.frontend):
            log.info("nothing to read again: no file of keys, no certificate")
            return
        for child in self._frontends:
            task = asyncio.create_task(self._let_reload(child))
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    async def _let_reload(self, child: Child) -> None:
        await child.is_ready.wait()  # before, the signal could end it
        child.signal(signal.SIGHUP)

    async def _keep_running(self, child: Child) -> None:
        await child.start()
        while True:
            code = await child.ended()
            if self._stop.is_set() and code == 0:  # a signal to all processes reached it too
                return
            if code == EXIT_CONFIG:  # it has said why, in one sentence
                log.info("giving up", child=child.name, exit_code=code)
                self._exit_code = EXIT_CONFIG
                self._stop.set()
                return
            if not child.may_restart(time.monotonic()):
                log.error("giving up", child=child.name, exit_code=code)
                self._exit_code = 1
                self._stop.set()
                return
            log.error("died, starting it again", child=child.name, exit_code=code)
            await child.start()

    def _kill_hung(self, pid: int) -> None:
        """End a worker that the scheduler has no answer from; one that was replaced meanwhile has another id."""
        running = self._worker.process
        if running is not None and running.pid == pid and running.returncode is None:
            log.error("hangs, killing it", child=self._worker.name)
            self._worker.signal(signal.SIGKILL)

    async def _watch(self) -> None:
        """Judge all children by what they say, for as long as this runs."""
        options = self._config.ipc
        interval, timeout = options.heartbeat_interval, options.heartbeat_timeout
        while True:
            await asyncio.sleep(interval)
            for child in (*self._engine, *self._frontends):
                patience = _PATIENCE if child is self._scheduler else _MORE_PATIENCE
                if child.silent_for(interval) > patience * timeout:
                    log.error("is silent, killing it", child=child.name)
                    child.signal(signal.SIGKILL)
            is_apart = self._scheduler.is_alone and self._worker.is_ready.is_set()
            self._seconds_apart = self._seconds_apart + interval if is_apart else 0.0
            if self._seconds_apart > _APART * timeout:
                log.error("scheduler and worker do not find each other, killing both")
                for child in self._engine:
                    child.signal(signal.SIGKILL)
                self._seconds_apart = 0.0
            reap_strangers({pid for child in (*self._engine, *self._frontends) for pid in child.pids})

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


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def reserve_ports(config: Config) -> tuple[Config, list[socket.socket]]:
    """Make sure that the ports are free, and choose one for port 0, before anything is loaded.

    With several frontends the bound (never listening) sockets are returned, to be kept open so that
    nobody else takes the ports between their starts.

    Raises:
        ConfigError: if an address cannot be bound.
    """
    options = config.frontend
    ports, kept = [], []
    for host, port in addresses(options):
        try:
            with bind(host, port, is_shared=False) as alone:  # a shared one would not mind who else is there
                ports.append(alone.getsockname()[1])
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        if options.num_frontends > 1:
            kept.append(bind(host, ports[-1], is_shared=True))
    return msgspec.structs.replace(config, frontend=msgspec.structs.replace(options, port=ports[0])), kept


def _quiet_on_terminal(config: Config) -> Config:
    """On a terminal people read the banner; lines of several processes would only run through it."""
    options = config.log
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty() and options.log_format != "json"
    if options.log_level != "auto" or not is_terminal:
        return config
    return msgspec.structs.replace(config, log=msgspec.structs.replace(options, log_level="warning"))


def serve(config: Config) -> int:
    """Run `penstock serve` to its end; the exit code."""
    config = _quiet_on_terminal(config)
    process.begin("penstock-supervisor", config.log.log_level, config.log.log_format)
    config, kept = reserve_ports(config)
    try:
        with private_dir(config.ipc.runtime_dir) as folder:
            return asyncio.run(Supervisor(with_addresses(config, Path(folder))).run())
    finally:
        for shared in kept:
            shared.close()
