"""Entry of the scheduler process: `python -m penstock.core --config-fd N`."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable

import structlog
import uvloop
import zmq

from penstock.core.config import Config, ConfigError
from penstock.core.engine import Engine
from penstock.ipc import process
from penstock.ipc.logs import refuse

log = structlog.get_logger()


async def run(config: Config, on_hung_worker: Callable[[int], None]) -> int:
    """Serve until SIGTERM; the exit code."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        engine = Engine(config, on_hung_worker)
    except (zmq.ZMQError, OSError, ConfigError) as error:
        refuse(f"{error} (addresses {config.ipc.frontend_address}, {config.ipc.worker_address})")
        return 1
    failed: list[BaseException | None] = []

    def on_callback_error(_: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        # The scheduler's state may be torn: better a restart, which peers survive, than a silent half-life.
        error = context.get("exception")
        failed.append(error if isinstance(error, BaseException) else None)
        log.error("internal error", message=context.get("message"), exc_info=error)
        stopped.set()

    loop.set_exception_handler(on_callback_error)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(engine.watch())
        log.info("ready", frontends=engine.frontend_channel.address, workers=engine.worker_channel.address)
        await stopped.wait()
        watch.cancel()
    engine.close()
    return 1 if failed else 0


def main() -> int:
    """Run the scheduler process."""
    config = process.inherited_config(sys.argv[1:], Config)
    process.begin("penstock-scheduler", config.log.log_level, config.log.log_format)
    gc.freeze()  # what was imported stays: the collector need not look at it again between two steps
    return uvloop.run(run(config, process.hung_process_reporter(sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
