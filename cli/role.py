"""`penstock role`: make an engine compute prompts for others, decode, or both, while it serves."""

import sys
from collections.abc import Sequence

from penstock.cli.engines import RefusedError, Server, add_server_options
from penstock.config.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Change a role; return the exit code (0: done, 2: refused)."""
    parser = Parser(
        "penstock role",
        "Change what an engine that was started with --role does with new requests. Those that it has go "
        "on as they are. Needs an API key with the scope admin, if the server has keys.",
    )
    parser.add_argument("engine", help="its number, as in /health")
    parser.add_argument("role", choices=("both", "prefill", "decode"))
    add_server_options(parser, "of the server, or of its administrators' listener")
    args = parser.parse_args(argv)
    try:
        Server(args.url, args.api_key).order(args.engine, "role", {"role": args.role})
    except RefusedError as error:
        print(f"penstock role: {error}", file=sys.stderr)
        return 2
    print(f"engine {args.engine}: {args.role}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
