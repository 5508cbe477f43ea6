"""Entry of a frontend process: `python -m penstock.frontend --config-fd N [--index I]`."""

import asyncio
import gc
import os
import signal
import socket
import sys

import uvloop

from penstock.config import Config, ConfigError
from penstock.config.listening import addresses, bind
from penstock.frontend.exchange.metrics_board import MetricsBoard
from penstock.frontend.http.private_parts import check_private_parts
from penstock.frontend.http.server import Server
from penstock.ipc import process
from penstock.ipc.logs import refuse
from penstock.ipc.parent import Parent, Word


def main() -> int:
    """Run one frontend to its end; return the exit code."""
    argv = sys.argv[1:]
    config = process.inherited_config(argv, Config, may_say_goodbye=True)
    index = int(process.options_of(argv).get("--index", "0"))
    name = f"penstock-frontend-{index}"
    process.begin(name, config.log.log_level, config.log.log_format)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # requests run in parallel already
    listeners = []
    for host, port in addresses(config.frontend):
        try:
            listeners.append(bind(host, port, is_shared=config.frontend.num_frontends > 1))
        except OSError as error:
            refuse(f"cannot listen on {host}:{port}: {error.strerror}")
            return process.EXIT_CONFIG
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(config, name, listeners, argv))
    except ConfigError as error:
        refuse(str(error))
        return process.EXIT_CONFIG


async def _run(config: Config, name: str, listeners: list[socket.socket], argv: list[str]) -> int:
    check_private_parts()
    arguments = process.options_of(argv)
    board = None
    if (shared := arguments.get("--metrics-fd")) is not None:
        board = MetricsBoard(int(shared), int(arguments["--index"]), config.frontend.num_frontends)
    server: Server
    loop = asyncio.get_running_loop()
    process.on_hangup(loop, lambda: server.reload())  # called while the loop runs: the server exists by then
    server = Server(config, name, board)
    parent = Parent.of(argv)

    def end() -> None:
        server.end(at_once=server.stopped.is_set() or process.is_orphan(argv))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, end)
    await server.start(*listeners, on_ready=lambda: parent.tell(Word.READY))
    alive = asyncio.create_task(parent.keep_telling(config.ipc.heartbeat_interval))
    gc.freeze()  # loaded objects are permanent: the collector need not scan them between requests
    await server.stopped.wait()
    await server.close()
    alive.cancel()
    return server.exit_code


if __name__ == "__main__":
    sys.exit(main())
