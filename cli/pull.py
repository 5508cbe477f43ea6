"""`penstock pull`: download a model into the local cache of the Hugging Face hub, and tell about it."""

import sys
from collections.abc import Sequence

from penstock.cli import models
from penstock.config.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Download; return the exit code (2: there is no such model, or it cannot be served or downloaded)."""
    parser = Parser(
        "penstock pull",
        "Download a model, so that `penstock serve` and `penstock run` find it on this machine. What is there already "
        "is not fetched again.",
    )
    parser.add_argument("model", metavar="ORG/NAME[:FILE][@REVISION]", help="its name on the Hugging Face hub")
    return models.main([parser.parse_args(argv).model, "--download"], parser.prog)


if __name__ == "__main__":
    sys.exit(main())
