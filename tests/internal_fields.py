"""`penstock` with fields of the configuration that are no options, in all processes of a launch.

async with serving(folder, **internal(head_timeout=2.0)) as server:
    ...

That runs `python -m tests.internal_fields serve FOLDER`, with the fields in a variable.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from penstock.cli import __main__ as cli
from penstock.cli import servers
from penstock.config import Config
from penstock.config.flags import config_from, fields

VARIABLE = "PENSTOCK_TEST_INTERNAL"


def internal(**values: Any) -> dict[str, str]:
    """The variable that has these fields."""
    assert values.keys() <= {field.field for field in fields() if field.is_internal}
    return {VARIABLE: json.dumps(values)} if values else {}


def command(environment: Mapping[str, str]) -> list[str]:
    """The beginning of a command line for this environment."""
    return [sys.executable, "-m", "tests.internal_fields" if VARIABLE in environment else "penstock.cli"]


def main() -> int:
    """Run the command with the fields; its exit code."""
    given = json.loads(os.environ[VARIABLE])

    def with_internal(namespace: Namespace, environment: Mapping[str, str]) -> Config:
        return config_from(Namespace(**vars(namespace), **given), environment)

    with patch.object(servers, "config_from", with_internal):
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
