"""Runs an engine under a replica: `python -m penstock.deploy.ray.engine_process --config-fd N --parent PID`.

It is `penstock serve` without frontends, in a process of its own. It restarts scheduler and ranks when they die, and
ends with the replica.
"""

import asyncio
import signal
import sys

from penstock.config import Config, ConfigError
from penstock.core.launch.launchers import addressed
from penstock.core.launch.spare import adopt_orphans, reap_strangers
from penstock.core.launch.supervisor import Supervisor
from penstock.ipc import process
from penstock.ipc.addresses import private_dir
from penstock.ipc.logs import refuse


async def _run(config: Config) -> int:
    supervisor, loop = Supervisor(config, has_frontends=False), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    process.ignore_hangup()
    adopt_orphans()
    running = asyncio.create_task(supervisor.run())
    while not running.done():
        await asyncio.wait((running,), timeout=config.ipc.heartbeat_interval)
        reap_strangers(supervisor.owners)
    return running.result()


def main() -> int:
    """Run the engine to its end; return the exit code."""
    config = process.inherited_config(sys.argv[1:], Config, may_say_goodbye=True)
    process.begin("penstock-engine", config.log.log_level, config.log.log_format)
    with private_dir() as folder:
        try:
            config = addressed(config, folder)
        except ConfigError as error:
            refuse(str(error))
            return process.EXIT_CONFIG
        return asyncio.run(_run(config))


if __name__ == "__main__":
    sys.exit(main())
