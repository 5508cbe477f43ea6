"""Writes the tables of `gguf.md` from the code: block types, architectures, and names of pre-tokenizers.

python -m docs.gguf_table            # write them
python -m docs.gguf_table --check    # exit 1 if they are not what would be written
"""

import sys
from pathlib import Path

from docs.written_parts import with_parts, write_or_check
from penstock.gpu_worker.formats.gguf_blocks import LAYOUTS
from penstock.models.gguf.architectures import ARCHITECTURES
from penstock.models.gguf.block_types import BLOCK_TYPES, FLOATS, UNREAD
from penstock.models.gguf.pre_tokenizers import PRE_TOKENIZERS

PAGE = Path(__file__).parent / "gguf.md"
_BEGIN = "<!-- {} is written by docs/gguf_table.py: run `make docs` after a change. -->\n"


def _types() -> str:
    rows = ["| type | bits of a weight | bits of a code | weights that share a scale |", "| --- | ---: | ---: | ---: |"]
    rows += [f"| {name} | {8 * its.num_bytes} | | |" for name, its in FLOATS.items()]
    for name, its in sorted(BLOCK_TYPES.items(), key=lambda pair: -pair[1].num_bytes / pair[1].num_elements):
        bits, group = LAYOUTS[name]
        rows.append(f"| {name} | {8 * its.num_bytes / its.num_elements:.4g} | {bits} | {group} |")
    return "\n".join(rows) + f"\n\nNot read, and refused by name: {', '.join(sorted(UNREAD.values()))}.\n"


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + "\n"


def page() -> str:
    """The whole page, with what belongs there."""
    parts = {
        "The table of types": _types(),
        "The list of architectures": _codes(sorted(ARCHITECTURES)),
        "The list of pre-tokenizers": _codes(list(PRE_TOKENIZERS)),
    }
    return with_parts(PAGE, {_BEGIN.format(name): written for name, written in parts.items()})


def main() -> int:
    """Write the tables, or check them; the exit code."""
    return write_or_check(PAGE, page)


if __name__ == "__main__":
    sys.exit(main())
