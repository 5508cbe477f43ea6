"""The planner's bounds beside figures that others published, in docs/planning.md.

python -m docs.planning_table            # write them
python -m docs.planning_table --check    # exit 1 if they are not what would be written
"""

import sys
from pathlib import Path

from docs.written_parts import with_parts, write_or_check
from tests.core.planning.published_steps import MEASURED, Beside, beside

PAGE = Path(__file__).parent / "planning.md"
_BEGIN = "<!-- Written by docs/planning_table.py: run `make docs` after changing the planner. -->\n"


def table() -> str:
    """A row for each configuration and figure."""
    rows = ["| | figure | published | bound | difference | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for measured in MEASURED:
        name = measured.name
        for each in beside(measured):
            mark = "beyond" if each.is_beyond else ""
            cells = (name, each.what, _number(each.published), _number(each.bound), _difference(each), mark)
            rows.append("| " + " | ".join(cells) + " |")
            name = ""
    return "\n".join(rows) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _difference(each: Beside) -> str:
    return f"{each.difference:+.0%}"


def page() -> str:
    """The whole page, with the table that belongs there."""
    return with_parts(PAGE, {_BEGIN: table()})


def main() -> int:
    """Write the table, or check it; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
