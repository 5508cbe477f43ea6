"""Entry of the scheduler process: `python -m penstock.core --config-fd N`."""

import asyncio
import gc
import signal
import sys
from time import monotonic

import structlog
import uvloop
import zmq

from penstock.config import Config, ConfigError
from penstock.core.engine.loop import Engine
from penstock.ipc import process
from penstock.ipc.logs import refuse
from penstock.ipc.messages import DrainEngine
from penstock.ipc.parent import Parent, Word

log = structlog.get_logger()

DRAIN_SECONDS = 30.0
"""As long as a frontend that ends waits for its streams (--shutdown-timeout)."""

_LOOK_SECONDS = 0.02


async def run(config: Config, parent: Parent, stopped: asyncio.Event, hurry: asyncio.Event) -> int:
    """Serve until `stopped` is set; return the exit code. The caller handles signals, in any thread.

    Unless `hurry` is set, frontends then get some time to move their requests to other engines, or to see them end.
    """
    loop = asyncio.get_running_loop()

    def restart() -> None:
        if parent.listens:
            parent.tell(Word.RESTART)
        else:  # the parent process starts it again
            stopped.set()

    try:
        engine = Engine(config, lambda pid: parent.tell(Word.HUNG, pid), restart)
    except ConfigError as error:
        refuse(str(error))
        return process.EXIT_CONFIG
    except (zmq.ZMQError, OSError) as error:  # another process may still hold the address: a retry may work
        refuse(f"{error} (addresses {config.ipc.frontend_address}, {config.ipc.worker_address})")
        return 1
    failed: list[BaseException | None] = []

    def on_callback_error(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        # The scheduler's state may be inconsistent. Peers survive a restart, so restart instead of carrying on.
        error = context.get("exception")
        failed.append(error if isinstance(error, BaseException) else None)
        log.error("internal error", message=context.get("message"), exc_info=error)
        stopped.set()

    loop.set_exception_handler(on_callback_error)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(engine.watch())
        alive = tasks.create_task(_keep_telling(parent, engine, config.ipc.heartbeat_interval))
        parent.tell(Word.READY)
        log.info("ready", frontends=engine.frontends.channel.address, workers=engine.workers.channel.address)
        await stopped.wait()
        if not failed:
            await _drain(engine, hurry)
        watch.cancel()
        await engine.finish()
        alive.cancel()
    engine.close()
    return 1 if failed else 0


async def _drain(engine: Engine, hurry: asyncio.Event) -> None:
    engine.drain(DrainEngine())
    deadline = monotonic() + DRAIN_SECONDS
    while not (engine.is_drained or hurry.is_set()) and monotonic() < deadline:  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(_LOOK_SECONDS)


async def _keep_telling(parent: Parent, engine: Engine, interval: float) -> None:
    """Report that the event loop turns, and whether there is a worker, for as long as the process runs."""
    while True:
        parent.tell(Word.ALIVE if engine.workers.is_ready else Word.ALONE)
        await asyncio.sleep(interval)


async def _run_process(config: Config, parent: Parent) -> int:
    """Serve until SIGTERM, then drain, but not after a second one; return the exit code."""
    loop = asyncio.get_running_loop()
    stopped, hurry = asyncio.Event(), asyncio.Event()

    def end() -> None:
        if stopped.is_set():
            hurry.set()
        stopped.set()

    process.on_hangup(loop, lambda: log.info("nothing to reload"))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return await run(config, parent, stopped, hurry)


def main() -> int:
    """Run the scheduler process."""
    config = process.inherited_config(sys.argv[1:], Config)
    name = process.options_of(sys.argv[1:]).get("--name", "penstock-scheduler")
    process.begin(name, config.log.log_level, config.log.log_format)
    gc.freeze()  # imported modules stay: the collector need not scan them between steps
    return uvloop.run(_run_process(config, Parent.of(sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
