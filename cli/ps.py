"""`penstock ps`: the servers that run on this machine."""

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.cli.running import Running, running
from penstock.config.api_keys import CLIENT_KEY_HELP, client_key
from penstock.config.parser import Parser
from penstock.config.sizes import size

_HEADERS = ("pid", "model", "address", "memory", "GPU memory", "uptime")


def main(argv: Sequence[str] | None = None) -> int:
    """List them; return the exit code."""
    parser = Parser(
        "penstock ps",
        "List the servers that you have started on this machine: model, address, memory of all their processes, time "
        "since the start. Servers in containers and those of other users are not seen.",
    )
    parser.add_argument("--api-key", default=client_key(), metavar="KEY", help=CLIENT_KEY_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = []
    for server in running():
        with suppress(OSError, IndexError):  # it has just ended
            found.append(_told(server, args.api_key))
    if args.json:
        print(json.dumps(found, indent=2))
    elif found:
        rows = [_HEADERS, *map(_row, found)]
        shown = [at for at, name in enumerate(_HEADERS) if name != "GPU memory" or any(row[at] for row in rows[1:])]
        widths = [max(len(row[at]) for row in rows) for at in shown]
        for row in rows:
            print("  ".join(row[at].ljust(width) for at, width in zip(shown, widths, strict=True)).rstrip())
    else:
        print("No server runs here. `penstock serve` starts one.")
    return 0


def _told(server: Running, key: str) -> dict[str, Any]:
    answers = server.asked(key)
    return {
        "pid": server.pid,
        "models": answers.models,
        "reason": answers.reason or None,
        "url": answers.url or None,
        "memory_bytes": server.memory_bytes,
        "gpu_memory_bytes": round(answers.device_bytes),
        "uptime_seconds": round(server.uptime_seconds, 1),
    }


def _row(told: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(told["pid"]),
        ", ".join(told["models"]) or f"({told['reason']})",
        told["url"] or "-",
        size(told["memory_bytes"]),
        size(told["gpu_memory_bytes"]) if told["gpu_memory_bytes"] else "",
        _uptime(round(told["uptime_seconds"])),
    )


def _uptime(seconds: int) -> str:
    for unit, name, smaller, its_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit:
            return f"{seconds // unit} {name} {seconds % unit // smaller} {its_name}"
    return f"{seconds} s"


if __name__ == "__main__":
    sys.exit(main())
