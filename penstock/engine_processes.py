"""An engine in processes of its own, as `penstock serve` starts it. This process takes the place of the frontends."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
import zmq

from penstock.config import Config, ConfigError
from penstock.config.addresses import with_addresses
from penstock.core.launch.kept_files import with_kept_files
from penstock.core.launch.supervisor import Supervisor
from penstock.frontend.engine.connection import Channel, EngineAddress, engine_addresses, over_sockets
from penstock.ipc.addresses import private_dir
from penstock.ipc.messages import ToFrontend


class EngineProcesses:
    """Scheduler and worker processes. A process that dies is started again, and the requests go on."""

    patience = 60.0
    """Seconds to wait for the engine when it is not ready."""

    def __init__(self, config: Config) -> None:
        log = msgspec.structs.replace(
            config.log, log_level="warning" if config.log.log_level == "auto" else config.log.log_level
        )
        worker = msgspec.structs.replace(config.worker, spare_worker=False)  # its forks would not be children of ours
        self._config = msgspec.structs.replace(config, log=log, worker=worker)
        self._held = ExitStack()
        self._supervisor: Supervisor | None = None

    async def start(self) -> None:
        """Start both processes, and wait until the model is loaded.

        Raises:
            ConfigError: if a process cannot work; the reason is on stderr.
        """
        folder = self._held.enter_context(private_dir())
        self._config = with_addresses(with_kept_files(self._config, folder), folder)
        self._context: zmq.Context[Any] = zmq.Context()
        self._supervisor = supervisor = Supervisor(self._config, has_frontends=False)
        self._running = asyncio.create_task(supervisor.run())
        loaded = asyncio.gather(*(child.is_ready.wait() for child in supervisor.children))
        ends: list[asyncio.Future[Any]] = [self._running, loaded]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self.stop()
            raise
        finally:
            loaded.cancel()
        if self._running.done():
            code = self._running.result()
            await self.stop()
            raise ConfigError(f"the engine cannot be started (exit code {code}); stderr says why")

    def addresses(self, name: str, model_fingerprint: str) -> list[EngineAddress]:
        """What a link to each engine needs."""
        return engine_addresses(self._config, name, model_fingerprint)

    def connect(
        self, to: EngineAddress, on_message: Callable[[ToFrontend], None], on_broken: Callable[[], None]
    ) -> Channel:
        """Connect over the sockets of this launch."""
        return over_sockets(self._context)(to, on_message, on_broken)

    async def stop(self) -> None:
        """End both processes."""
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor = None
            await self._running
            self._context.term()
            self._held.close()
