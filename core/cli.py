"""The `penstock` command. It starts the other packages by module name and imports none of them."""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from penstock.core.config import Config, ConfigError
from penstock.core.config.addresses import require_addresses
from penstock.core.config.checkpoint import model_dir
from penstock.core.config.flags import add_flags, config_from
from penstock.core.config.listening import check_listening
from penstock.core.output_files import check_output_files
from penstock.ipc import process
from penstock.ipc.addresses import AddressError, private_dir

EXIT_CONFIG = 2

# command -> (help, option groups, takes MODEL)
_SERVERS: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "serve": (
        "serve a checkpoint (default: the demo model): all processes on this machine",
        ("model", "scheduler", "worker", "frontend", "ipc", "log"),
        True,
    ),
    "frontend": ("one HTTP frontend", ("model", "frontend", "ipc", "log"), True),
    "scheduler": ("the scheduler", ("scheduler", "ipc", "log"), False),
    "worker": ("one worker", ("model", "scheduler", "worker", "ipc", "log"), True),
}
# command -> (help, module that runs it); these parse their own flags
_TOOLS = {
    "keys": ("make an API key, or the keys of tcp:// channels", "penstock.core.make_key"),
    "chat": ("talk to a server in the terminal", "penstock.frontend.terminal_chat"),
    "bench serve": ("put load on an OpenAI endpoint and measure it", "penstock.bench.serve"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: the options cannot work)."""
    process.open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    for command, (_, module) in _TOOLS.items():
        words = command.split()
        if arguments[: len(words)] == words:
            os.execv(sys.executable, [sys.executable, "-m", module, *arguments[len(words) :]])
    namespace = _parser().parse_args(arguments)
    if namespace.command == "version":
        print(f"penstock {importlib.metadata.version('penstock')}")
        return 0
    try:
        return _run_server(namespace.command, config_from(namespace, os.environ))
    except (ConfigError, AddressError) as error:
        with suppress(OSError):  # a full disk, say
            print(f"penstock: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="An LLM inference engine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, groups, takes_model) in _SERVERS.items():
        command = commands.add_parser(name, help=text, description=text)
        if takes_model:
            command.add_argument(
                "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="checkpoint folder"
            )
        add_flags(command, groups)
    for name, (text, _) in _TOOLS.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("version", help="print the version")
    return parser


def _run_server(command: str, config: Config) -> int:
    check_output_files(config)
    if command in ("serve", "frontend"):
        check_listening(config.frontend)
    if command == "serve":
        from penstock.core.supervisor import serve  # asyncio and zmq, which `version` can do without

        return serve(config)
    if config.ipc.runtime_dir:
        with private_dir(config.ipc.runtime_dir):
            pass  # it is there from now on, whoever starts first
    if command == "scheduler":
        return _become("penstock.core", require_addresses(config, frontend=True, worker=True))
    model_dir(config)
    if command == "worker":
        return _become("penstock.gpu_worker", require_addresses(config, worker=True))
    return _become("penstock.frontend", require_addresses(config, frontend=True))


def _become(module: str, config: Config) -> int:
    """Replace this process by the one that runs `module`, so that signals and exit codes are its own."""
    descriptor = process.pass_config(config)
    os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, "-m", module, "--config-fd", str(descriptor)])


if __name__ == "__main__":
    sys.exit(main())
