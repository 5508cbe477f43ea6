"""`penstock keys`: make an API key."""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence

from penstock.core.config.api_keys import LIMITS, SCOPES, digest


def main(argv: Sequence[str] | None = None) -> int:
    """Print the key to give away, and what to put into the file: it cannot be turned back into the key."""
    parser = argparse.ArgumentParser(prog="penstock keys", description="Make an API key.")
    parser.add_argument("id", help="whose key it is, as the server's log may say")
    parser.add_argument(
        "--scopes", nargs="+", choices=SCOPES, default=["infer"], help="what it allows (default: infer)"
    )
    for name in LIMITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="a limit (default: none)")
    parser.add_argument("--namespace", help="cached prompts are shared only with keys of the same one")
    args = parser.parse_args(argv)
    key = f"pk-{secrets.token_urlsafe(32)}"
    print(f"API key, shown only now: {key}", file=sys.stderr)
    scopes = ", ".join(f'"{scope}"' for scope in args.scopes)
    print(f'[[keys]]\nid = {json.dumps(args.id)}\nsha256 = "{digest(key).hex()}"\nscopes = [{scopes}]')
    for name in (*LIMITS, "namespace"):
        if (value := getattr(args, name)) is not None:
            print(f"{name} = {json.dumps(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
