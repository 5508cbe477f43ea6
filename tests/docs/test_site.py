"""The documentation site: it builds without a warning, its links lead somewhere, its options are the real ones."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.docs.fences import ROOT

_OUTSIDE = ("http://", "https://", "mailto:", "data:")


class Page(HTMLParser):
    """What a page links to, what it loads, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if anchor := values.get("id") or (values.get("name") if tag == "a" else None):
            self.anchors.add(anchor)
        if tag == "a" and (target := values.get("href")):
            self.links.add(target)
        if tag in ("img", "script", "iframe", "source") and (target := values.get("src")):
            self.loads.add(target)
        if tag == "link" and (target := values.get("href")) and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.add(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The built pages by their path."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text()) for path in folder.rglob("*.html")}


def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    broken = []
    for path, page in site.items():
        for link in sorted(page.links | page.loads):
            if link.startswith(_OUTSIDE):
                continue
            target, anchor = urldefrag(unquote(link))
            target = target.split("?")[0]  # after it, Sphinx puts a check sum
            file = (path.parent / target).resolve() if target else path
            if not file.is_file() or (anchor and file in site and anchor not in site[file].anchors):
                broken.append(f"{path.name}: {link}")
    assert not broken
    assert len(site) > 10


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    assert [
        load for page in site.values() for load in page.loads if load.startswith(_OUTSIDE) or "//" in load[:8]
    ] == []


@pytest.mark.parametrize(
    "writer", ["options_page", "tool_table", "api_tables", "foreign_flags_table", "removed_options"]
)
def test_what_is_written_by_a_program_is_up_to_date(writer: str) -> None:
    command = [sys.executable, "-m", f"docs.{writer}", "--check"]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == 0, "run `make docs`"
