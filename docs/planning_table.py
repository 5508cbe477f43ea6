"""The devices that `penstock plan` knows, in docs/planning.md.

python -m docs.planning_table            # write them
python -m docs.planning_table --check    # exit 1 if they are not what would be written
"""

import sys
from pathlib import Path

from docs.written_parts import with_parts, write_or_check
from penstock.lab.planning.machines import load_machines

PAGE = Path(__file__).parent / "planning.md"
_BEGIN = "<!-- Written by docs/planning_table.py: run `make docs` after changing the list of devices. -->\n"


def table() -> str:
    """A row for each device."""
    kinds = ("fp16", "fp8", "int8")
    rows = [
        "| `--gpu` | | memory, GB | reads, TB/s | link, GB/s | FP16, TFLOP/s | FP8 | INT8 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for key, machine in load_machines().items():
        rates = [f"{machine.flops[kind] / 1e12:,.0f}" if kind in machine.flops else "" for kind in kinds]
        sizes = (f"{machine.memory / 1e9:.0f}", f"{machine.bandwidth / 1e12:.3g}", f"{machine.link / 1e9:.0f}")
        rows.append("| " + " | ".join((f"`{key}`", machine.name, *sizes, *rates)) + " |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The whole page, with the table that belongs there."""
    return with_parts(PAGE, {_BEGIN: table()})


def main() -> int:
    """Write the table, or check it; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
