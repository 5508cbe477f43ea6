"""Entry of a frontend process: `python -m penstock.frontend --config-fd N [--index I]`."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import structlog
import uvloop

from penstock.core.config import Config, ConfigError
from penstock.ipc import process

log = structlog.get_logger()

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
    if config.frontend.num_frontends > 1 and config.ipc.runtime_dir:
        metrics_dir = Path(config.ipc.runtime_dir) / "metrics"
        metrics_dir.mkdir(mode=0o700, exist_ok=True)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics_dir)
    try:
        listener = _listen(config)
    except OSError as error:
        log.error("cannot listen", host=config.frontend.host, port=config.frontend.port, reason=error.strerror)
        return EXIT_CONFIG
    try:
        with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(config, name, listener, argv))
    except ConfigError as error:
        log.error("cannot start", reason=str(error))
        return EXIT_CONFIG


def _listen(config: Config) -> socket.socket:
    """The listening socket; shared with the other frontends if there are several."""
    options = config.frontend
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if options.num_frontends > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((options.host, options.port))
    except OSError:
        listener.close()
        raise
    return listener


async def _run(config: Config, name: str, listener: socket.socket, argv: list[str]) -> int:
    from penstock.frontend.server import Server  # only now: prometheus_client reads its variable when imported

    server = Server(config, name)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopped.set)
    await server.start(listener, on_ready=lambda: process.report_ready(argv))
    await server.stopped.wait()
    await server.close()
    return server.exit_code


if __name__ == "__main__":
    sys.exit(main())
