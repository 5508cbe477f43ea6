"""Entry of a frontend process: `python -m penstock.frontend --config-fd N [--index I]`."""

import asyncio
import gc
import os
import signal
import socket
import sys

import uvloop

from penstock.core.config import Config, ConfigError
from penstock.core.config.listening import addresses, bind, has_files
from penstock.frontend.metrics_board import MetricsBoard
from penstock.frontend.server import Server
from penstock.ipc import process
from penstock.ipc.logs import refuse

EXIT_CONFIG = 2
"""For a configuration that cannot work: starting again would not help."""


def main() -> int:
    """Run one frontend to its end; the exit code."""
    argv = sys.argv[1:]
    config = process.inherited_config(argv, Config)
    index = int(dict(zip(argv[::2], argv[1::2], strict=False)).get("--index", "0"))
    name = f"penstock-frontend-{index}"
    process.begin(name, config.log.log_level, config.log.log_format)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # requests are the parallelism
    listeners = []
    for host, port in addresses(config.frontend):
        try:
            listeners.append(bind(host, port, is_shared=config.frontend.num_frontends > 1))
        except OSError as error:
            refuse(f"cannot listen on {host}:{port}: {error.strerror}")
            return EXIT_CONFIG
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(config, name, listeners, argv))
    except ConfigError as error:
        refuse(str(error))
        return EXIT_CONFIG


async def _run(config: Config, name: str, listeners: list[socket.socket], argv: list[str]) -> int:
    arguments = dict(zip(argv[::2], argv[1::2], strict=False))
    board = None
    if (shared := arguments.get("--metrics-fd")) is not None:
        board = MetricsBoard(int(shared), int(arguments["--index"]), config.frontend.num_frontends)
    server: Server
    loop = asyncio.get_running_loop()
    if has_files(config.frontend):
        process.on_hangup(loop, lambda: server.reload())  # when the loop runs on: the server is there by then
    server = Server(config, name, board)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopped.set)
    await server.start(*listeners, on_ready=lambda: process.report_ready(argv))
    gc.freeze()  # what was loaded stays: the collector need not look at it again between two requests
    await server.stopped.wait()
    await server.close()
    return server.exit_code


if __name__ == "__main__":
    sys.exit(main())
