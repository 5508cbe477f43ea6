"""`penstock drain`: take engines out of service without losing a stream, and restart them one after the other."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from penstock.cli.engines import RefusedError, Server, add_server_options
from penstock.config.argument_types import not_negative_float
from penstock.config.parser import Parser

_LOOK_SECONDS = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Drain; return the exit code (0: done, 1: not in time, 2: refused)."""
    parser = Parser(
        "penstock drain",
        "Take engines out of service. Their requests go on at the other engines, without a lost token; an "
        "engine without others finishes what it has. Needs an API key with the scope admin, if the server has keys.",
    )
    parser.add_argument("engine", nargs="?", help="its number, as in /health (default: the only one)")
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--restart", action="store_true", help="then start its processes again, and wait until it serves"
    )
    wanted.add_argument("--undo", action="store_true", help="let it take requests again")
    parser.add_argument("--all", action="store_true", help="all engines; with --restart one after the other")
    add_server_options(parser, "of the server, or of its administrators' listener")
    parser.add_argument(
        "--seconds",
        type=not_negative_float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for each engine (default: 600)",
    )
    args = parser.parse_args(argv)
    server = Server(args.url, args.api_key)
    try:
        chosen = _chosen(server.engines(), args.engine, is_all=args.all)
        if args.undo:
            for engine in chosen:
                server.order(engine, "undrain")
            return 0
        for engine in chosen:
            if not args.restart:
                server.order(engine, "drain")
            elif not _restart(server, engine, args.seconds):
                return 1
        if not args.restart:
            return 0 if all(_wait_until_drained(server, engine, args.seconds) for engine in chosen) else 1
    except RefusedError as error:
        print(f"penstock drain: {error}", file=sys.stderr)
        return 2
    return 0


def _chosen(engines: dict[str, dict[str, Any]], wanted: str | None, *, is_all: bool) -> list[str]:
    if is_all:
        if wanted is not None:
            raise RefusedError("name an engine, or give --all")
        return list(engines)
    if wanted is None:
        if len(engines) > 1:
            raise RefusedError(f"there are several engines ({', '.join(engines)}): name one, or give --all")
        return list(engines)
    if wanted not in engines:
        raise RefusedError(f"there is no engine {wanted!r}; there is: {', '.join(engines)}")
    return [wanted]


def _wait_until_drained(server: Server, engine: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.engines()[engine]["state"] in ("drained", "not ready"):
            print(f"engine {engine} is drained")
            return True
        time.sleep(_LOOK_SECONDS)
    print(f"penstock drain: engine {engine} still has requests after {seconds:g} s", file=sys.stderr)
    return False


def _restart(server: Server, engine: str, seconds: float) -> bool:
    before = server.engines()[engine]["start_id"]
    server.order(engine, "restart")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = server.engines()[engine]
        if now["start_id"] != before and now["state"] == "ready":
            print(f"engine {engine} serves again")
            return True
        time.sleep(_LOOK_SECONDS)
    print(f"penstock drain: engine {engine} does not serve again after {seconds:g} s", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
