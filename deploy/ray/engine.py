"""An engine as a replica of Ray Serve. Scheduler and ranks are its child processes, which frontends reach by ZeroMQ.

No request goes through the replica itself. Frontends ask for its `card`, and then talk to its scheduler directly,
encrypted with keys of this engine. When Serve stops the replica, Serve no longer names it to frontends. So frontends
move their requests to other engines, and the replica ends when it has none left.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import ray
import structlog
import zmq
from ray import serve

from penstock.config import Config
from penstock.config.listening import bind
from penstock.deploy.ray.autoscaling import ROWS, RUNNING, WAITING_TOKENS
from penstock.frontend.engine.book import RequestBook
from penstock.frontend.engine.connection import EngineAddress, over_sockets
from penstock.frontend.engine.link import EngineLink
from penstock.ipc import process
from penstock.ipc.curve import make_key_file
from penstock.ipc.key_file import read_key_file
from penstock.ipc.logs import setup_logging
from penstock.models.check import check_checkpoint
from penstock.models.files.source import fingerprint
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model
from penstock.models.part import check_further

log = structlog.get_logger()

_LOOK_SECONDS = 0.2
_OF_RAY_WORKERS = frozenset(("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS"))
STOP_SECONDS = 20.0
"""For the processes of an engine to end, in addition to `--shutdown-timeout` for its requests."""


class EngineCard(NamedTuple):
    """How frontends reach an engine."""

    name: str  # unique among all engines, including former ones
    address: str
    public_key: bytes
    secret_key: bytes


class Engine:
    """The replica."""

    async def __init__(self, config: bytes) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the processes and load the model; `config` is a Config in JSON.

        Raises:
            ConfigError: if the options or the checkpoint cannot work here.
        """
        given = msgspec.json.decode(config, type=Config)
        self._name = serve.get_replica_context().replica_id.unique_id
        setup_logging(f"penstock-engine-{self._name}", given.log.log_level, given.log.log_format)
        self._is_stopping = False
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-ray-")
        keys = Path(self._folder.name) / "channel"
        make_key_file(keys)
        host = ray.util.get_node_ip_address()
        self._port = bind(host, 0, is_shared=False)  # never listens; it reserves the port for the scheduler's restarts
        self._config = await asyncio.to_thread(_located, given)
        ipc = msgspec.structs.replace(
            self._config.ipc,
            frontend_address=f"tcp://{host}:{self._port.getsockname()[1]}",
            channel_key_file=str(keys),
        )
        self._config = msgspec.structs.replace(self._config, ipc=ipc)
        own = read_key_file(keys)
        self._card = EngineCard(self._name, ipc.frontend_address, *own)
        self._process = _start(self._config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        intervals = ipc.heartbeat_interval, ipc.heartbeat_timeout
        model = fingerprint(open_model(self._config))
        to = EngineAddress(ipc.frontend_address, f"engine-{self._name}", model, *intervals, own)
        self._link = EngineLink(to, over_sockets(self._context), log.error)
        # This link sends no requests. It receives what the scheduler reports about itself.
        self._watch = RequestBook([self._link], self._config.scheduler)
        while not (self._watch.ready.is_set() or self._is_stopping):
            await self.check_health()
            await asyncio.sleep(_LOOK_SECONDS)

    async def card(self) -> EngineCard:
        """How to reach this engine."""
        return self._card

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica if this raises."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"the engine has ended with exit code {code}; its log says why")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The numbers by which `autoscaling.py` decides; called by Serve."""
        stats = self._link.stats
        if stats is None:
            return {WAITING_TOKENS: 0.0, RUNNING: 0.0, ROWS: 1.0}
        return {
            WAITING_TOKENS: float(stats.num_waiting_tokens),
            RUNNING: float(stats.num_running),
            ROWS: float(stats.num_rows),
        }

    async def __del__(self) -> None:
        """Called by Serve before it ends the replica: let frontends take their requests elsewhere, or finish them."""
        if not hasattr(self, "_watch"):
            return
        self._is_stopping = True
        deadline = time.monotonic() + self._config.frontend.shutdown_timeout
        while time.monotonic() < deadline and self._has_work():  # noqa: ASYNC110 (statistics come as they come)
            await asyncio.sleep(_LOOK_SECONDS)
        log.info("engine stopping", still_has_work=self._has_work())
        await self._watch.close()
        self._context.term()
        self._process.terminate()
        while self._process.poll() is None:  # noqa: ASYNC110 (Serve bounds it)
            await asyncio.sleep(_LOOK_SECONDS)
        self._port.close()
        self._folder.cleanup()

    def _has_work(self) -> bool:
        stats = self._link.stats
        return stats is not None and stats.num_running + stats.num_waiting + stats.num_paused > 0


def _start(config: Config) -> "subprocess.Popen[bytes]":
    descriptor = process.pass_config(config)
    try:
        module = "penstock.deploy.ray.engine_process"
        arguments = ("--config-fd", str(descriptor), "--parent", str(os.getpid()))
        return subprocess.Popen((sys.executable, "-m", module, *arguments), pass_fds=(descriptor,), env=_environment())
    finally:
        os.close(descriptor)


def _environment() -> dict[str, str]:
    """Environment variables for a process that may connect to the cluster by itself, without those of a Ray worker."""
    own = {name: value for name, value in os.environ.items() if name not in _OF_RAY_WORKERS}
    return own | {"RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}


def _located(config: Config) -> Config:
    """The configuration with the path of the checkpoint, which is downloaded to this node if it is missing."""
    with_weights = config.worker.load_format != "dummy"
    found = located(config, with_weights=with_weights, with_tokenizer=False)
    check_checkpoint(
        open_model(found),
        found.model.model_impl,
        found.worker.quantization,
        found.worker.kv_cache_dtype,
        with_weights=with_weights,
        with_tokenizer=False,
    )
    check_further(found, with_weights=with_weights, with_tokenizer=False)
    return found
