"""`penstock serve` whose worker has the scripted model; takes the same arguments."""

import sys
from typing import Any
from unittest.mock import patch

from penstock.cli import __main__ as cli
from penstock.core.launch import launchers
from penstock.core.launch.child import Child


def child(name: str, module: str, *arguments: Any, **options: Any) -> Child:
    """As `Child`, with another worker."""
    return Child(
        name, "tests.agents.scripted_worker" if module == "penstock.gpu_worker" else module, *arguments, **options
    )


if __name__ == "__main__":
    with patch.object(launchers, "Child", child):
        sys.exit(cli.main(["serve", *sys.argv[1:], "--no-spare-worker"]))
