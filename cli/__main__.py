"""The `penstock` command. It starts the other packages by module name, and imports none of them."""

import os
import signal
import sys
from collections.abc import Sequence

from penstock.cli.commands import COMMANDS, SAME, complain, listing, unknown_command
from penstock.ipc import process
from penstock.ipc.version import VERSION

_TOOL = "penstock.cli.tool"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2: the options cannot work)."""
    process.open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in SAME:
        arguments[0] = SAME[arguments[0]]
    for name, command in COMMANDS.items():
        words = name.split()
        if command.module and arguments[: len(words)] == words:
            os.execv(sys.executable, [sys.executable, "-m", _TOOL, command.module, *arguments[len(words) :]])
    name, *rest = arguments or [""]
    if name in ("--version", "-V", "version"):
        print(f"penstock {VERSION}")
        return 0
    if name in ("", "--help", "-h", "help"):
        print(f"usage: penstock COMMAND [OPTIONS]\n\nAn LLM inference engine.\n\n{listing()}")
        return 0 if name else process.EXIT_CONFIG
    if name == "bench":  # its commands have two words
        print("usage: penstock bench COMMAND\n")
        print(*(f"  {each}  {COMMANDS[each].about}" for each in COMMANDS if each.startswith("bench ")), sep="\n")
        return 0 if rest in (["-h"], ["--help"]) else process.EXIT_CONFIG
    if name not in COMMANDS:
        complain(unknown_command(name))
        return process.EXIT_CONFIG
    return _run(name, rest)


def _run(name: str, rest: list[str]) -> int:
    from penstock.cli.servers import run  # imported here because other commands have no use for its imports
    from penstock.config import ConfigError
    from penstock.ipc.addresses import AddressError
    from penstock.ipc.logs import flush_logs

    try:
        return run(name, rest)
    except (ConfigError, AddressError) as error:
        complain(str(error))
        return process.EXIT_CONFIG
    except KeyboardInterrupt:  # during a download; the server handles signals itself
        complain("stopped; the same command goes on with the download")
        flush_logs()
        os._exit(128 + signal.SIGINT)  # do not wait for the library's threads


if __name__ == "__main__":
    sys.exit(main())
