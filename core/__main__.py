"""Entry of the scheduler process: `python -m penstock.core --config-fd N`."""

import asyncio
import signal
import sys

import structlog
import uvloop
import zmq

from penstock.core.config import Config
from penstock.core.engine import Engine
from penstock.ipc import process

log = structlog.get_logger()


async def run(config: Config) -> int:
    """Serve until SIGTERM; the exit code."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        engine = Engine(config)
    except (zmq.ZMQError, OSError) as error:
        log.error("cannot start", reason=str(error), addresses=[config.ipc.frontend_address, config.ipc.worker_address])
        return 1
    watch = asyncio.create_task(engine.watch())
    stop = asyncio.create_task(stopped.wait())
    log.info("ready", frontends=engine.frontend_channel.address, workers=engine.worker_channel.address)
    await asyncio.wait((watch, stop), return_when=asyncio.FIRST_COMPLETED)
    engine.close()
    if watch.done():  # it never ends by itself
        watch.result()
        return 1
    watch.cancel()
    return 0


def main() -> int:
    """Run the scheduler process."""
    config = process.inherited_config(sys.argv[1:], Config)
    process.begin("penstock-scheduler", config.log.log_level, config.log.log_format)
    return uvloop.run(run(config))


if __name__ == "__main__":
    sys.exit(main())
