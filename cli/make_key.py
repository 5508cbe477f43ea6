"""`penstock keys`: make an API key, or the keys of tcp:// channels."""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.config.api_keys import LIMITS, SCOPES, TENANTS, checked_key, digest
from penstock.config.argument_types import positive, positive_float
from penstock.config.options import ConfigError
from penstock.config.parser import Parser
from penstock.ipc.curve import make_key_file
from penstock.ipc.key_file import KeyFileError


def main(argv: Sequence[str] | None = None) -> int:
    """Make the requested key; return the exit code."""
    parser = Parser("penstock keys", "Make an API key, or the keys that the processes of a launch share.")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("id", nargs="?", help="make an API key for this owner (the name appears in the server's log)")
    wanted.add_argument("--channel", type=Path, metavar="FILE", help="make a new file for --channel-key-file")
    parser.add_argument(
        "--scopes",
        nargs="+",
        choices=SCOPES,
        default=["infer"],
        metavar="SCOPE",
        help=f"what the API key allows: {', '.join(SCOPES)} (default: infer)",
    )
    parser.add_argument("--if-missing", action="store_true", help="succeed if FILE exists already")
    for name in LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, help="a limit (default: none)")
    parser.add_argument("--namespace", help="share cached prompts only with keys of the same namespace")
    parser.add_argument(
        "--weight", type=positive_float, help="share under the fair policy, relative to other keys (default: 1)"
    )
    parser.add_argument(
        "--tenant-by", choices=TENANTS, help="who takes turns: the key, or each `user` of its requests (default: key)"
    )
    args = parser.parse_args(argv)
    if args.channel is not None:
        return _make_channel_keys(args.channel, args.if_missing)
    return _print_api_key(args)


def _make_channel_keys(path: Path, if_missing: bool) -> int:
    try:
        make_key_file(path)
    except FileExistsError:
        if if_missing:
            return 0
        print(f"penstock keys: {str(path)!r} exists; processes may be using it", file=sys.stderr)
        return 2
    except KeyFileError as error:
        print(f"penstock keys: {error}", file=sys.stderr)
        return 2
    return 0


def _print_api_key(args: argparse.Namespace) -> int:
    """Print the key for its user, and the entry for the key file, from which the key cannot be recovered."""
    key = f"pk-{secrets.token_urlsafe(32)}"
    said = {name: getattr(args, name) for name in ("scopes", *LIMITS, "namespace", "weight", "tenant_by")}
    entry = {"id": args.id, "sha256": digest(key).hex()} | {name: it for name, it in said.items() if it is not None}
    try:
        checked_key("penstock keys", entry)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"API key, shown only now: {key}", file=sys.stderr)
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in entry.items())
    print("\n".join(("[[keys]]", *lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
