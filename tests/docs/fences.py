"""The commands of README and docs: fenced blocks marked `bash` or `python`, and what a comment before them says."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "demo" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
KINDS = ("run", "refused", "serve", "serve together", "chat", "docker", "gpu", "dry run", "ray", "kubectl", "cluster")
"""`run`, the kind of an unmarked block, needs one server; the others are told in CONTRIBUTING.md."""

_FENCE = re.compile(
    r"(?:^<!-- commands: (?P<kind>[a-z ]+) -->\n)?^```(?P<language>bash|python)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Fence(NamedTuple):
    """One block of commands."""

    page: str
    kind: str
    language: str
    text: str


def fences() -> list[Fence]:
    """All blocks in all pages; a block that stands on several pages, once."""
    found: dict[tuple[str, str], Fence] = {}
    for path in PAGES:
        for match in _FENCE.finditer(path.read_text()):
            fence = Fence(str(path.relative_to(ROOT)), match["kind"] or "run", match["language"], match["text"])
            found.setdefault((fence.kind, fence.text), fence)
    return list(found.values())


def names(of: list[Fence]) -> list[str]:
    """For pytest's ids: page and first words."""
    return [f"{fence.page}: {' '.join(fence.text.split()[:5])}" for fence in of]
