"""What README and docs say of Penstock, held against the program wherever a program can tell."""

import json
import re
import struct
import tomllib
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest

from bench.peers.report import figures_rows
from penstock.config.flags import flags
from penstock.core.launch import child
from penstock.frontend.api.service import KEEP_ALIVE_SECONDS, READY_WAIT_SECONDS
from penstock.frontend.engine.book import RESUME_WAIT_SECONDS
from penstock.frontend.http.routes import ROUTES
from penstock.frontend.http.server import KEEPALIVE_SECONDS
from penstock.frontend.validation.completion import DEFAULT_COMPLETION_TOKENS
from penstock.ipc.version import DISTRIBUTION
from penstock.models.families.registry import ARCHITECTURES
from penstock.models.parsing.rope import ROPE_KINDS
from tests.docs.fences import PAGES, ROOT
from tests.docs.metric_names import metric_names

README = (ROOT / "README.md").read_text()
RECORD = ROOT / "bench/results/2026-11-21-xeon-2-cores/peers-3.json"
"""The comparison that README's table shows."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def code_spans(page: Path) -> Iterator[str]:
    """What stands between backticks, outside blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)


def test_the_comparison_shows_every_row_of_its_record() -> None:
    """Those that Penstock loses, too."""
    table = README[README.index("## How fast") : README.index("## The API")]
    shown = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    record = json.loads(RECORD.read_text())
    measured = [
        [re.sub(r" \(.*\)", "", cell) for cell in row[1:]] for row in figures_rows(record, list(record["systems"]))
    ]
    assert sorted(row[1:] for row in shown[1:]) == sorted(measured)


def test_the_best_figure_of_each_row_is_bold() -> None:
    table = README[README.index("## How fast") : README.index("## The API")]
    for line in table.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or "---" in line or not any(char.isdigit() for char in cells[0]):
            continue
        values = [float(cell.strip("*").replace(",", "")) for cell in cells]
        best = max(values) if "tok/s" in name else min(values)
        assert [cell.startswith("**") for cell in cells] == [value == best for value in values], name


def test_the_demo_model_is_as_large_as_told() -> None:
    with (ROOT / "demo/model/model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    count = sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    assert f"{count / 1e6:.1f} million\nparameters" in README or f"{count / 1e6:.1f} million parameters" in README


@each_page
def test_the_models_that_are_named_are_those_that_load(page: Path) -> None:
    """docs/models.md lists all; it is written from the code, and checked by `docs/models_table.py --check`."""
    assert set(re.findall(r"`(\w+ForCausalLM)`", page.read_text())) <= set(ARCHITECTURES)


def test_all_rotary_scalings_are_named() -> None:
    assert set(ROPE_KINDS) - {"default"} <= set(code_spans(ROOT / "docs/models.md"))


@each_page
def test_flags_that_are_named_exist(page: Path) -> None:
    if page.name == "options.md":
        return  # written from the options themselves, and checked by `docs/options_page.py --check`
    known = {name for flag in flags() for name in (flag.name, *flag.shown.also)} | {"--help"}
    known |= {"--no-" + name.removeprefix("--") for name in known}
    sources = [
        path
        for folder in ("penstock", "bench", "cli", "config", "core", "demo", "kernels", "lab", "models")
        for path in (ROOT / folder).rglob("*.[ps][yh]")
    ]
    known |= {name for path in sources for name in re.findall(r"--[a-z][a-z0-9-]+", path.read_text())}
    of_compose = {"--scale", "--profile", "--build", "--detach", "--wait", "--gpus"}
    named = {span.split()[0].split("=")[0] for span in code_spans(page) if re.match(r"--[a-z]", span)}
    assert named - known - of_compose == set()


@each_page
def test_defaults_that_are_told_are_the_defaults(page: Path) -> None:
    defaults = {flag.name: str(flag.default) for flag in flags()}
    told = re.findall(r"`(--[a-z-]+)[^`]*`[,\s(]*(?:by )?default:?\s+`?([\d.]+\d|\d)", page.read_text())
    for name, value in told:
        assert defaults.get(name) in (value, value + ".0"), f"{page.name} says that {name} defaults to {value}"


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"build"}
    for span in code_spans(page):
        path = span.split()[0].rstrip("/")
        if not re.fullmatch(r"[\w./*-]+", path) or path.split("/")[0] not in folders or "/" not in path:
            continue
        found = list(ROOT.glob(path)) if "*" in path else [ROOT / path]
        assert found, f"{page.name} names {path}"
        assert all(place.exists() for place in found), f"{page.name} names {path}"


@each_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"\bpenstock_[a-z0-9_]*[a-z](?![a-z0-9_*])", page.read_text()))
    assert named - metric_names() == set()


def test_deaths_that_end_a_launch_are_as_many_as_told() -> None:
    words = {5: "five"}
    never_ready, at_work = child._MAX_DEATHS, child._MAX_DEATHS_AT_WORK
    operations, reliability = ((ROOT / f"docs/{name}.md").read_text() for name in ("operations", "reliability"))
    assert (
        f"dies {words[never_ready]} times in a minute before it is ready, or {at_work} times while serving"
        in operations
    )
    assert f"ready {words[never_ready]} times in a minute" in " ".join(reliability.split())
    assert f"dies while serving may do so {at_work} times a minute" in " ".join(reliability.split())


def test_a_request_without_a_worker_waits_as_long_as_told() -> None:
    told = " ".join((ROOT / "docs/api.md").read_text().split())
    assert f"wait {READY_WAIT_SECONDS:.0f} seconds before they fail, and {RESUME_WAIT_SECONDS:.0f} if theirs" in told


def test_every_error_code_is_listed() -> None:
    """Also of errors in modules that docs/api_tables.py does not import."""
    told = (ROOT / "docs/api.md").read_text()
    sources = [path.read_text() for room in ("frontend", "parts") for path in (ROOT / room).rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r'\(\w+, (?:.*, )?code="([a-z_]+)"', source)}
    assert len(codes) > 45
    assert [code for code in sorted(codes) if f"| `{code}` |" not in told] == []


def test_silent_streams_and_idle_connections() -> None:
    told = " ".join((ROOT / "docs/api.md").read_text().split())
    assert f"in {KEEP_ALIVE_SECONDS:.0f} seconds without output" in told
    assert f"closed after {KEEPALIVE_SECONDS:.0f} seconds" in told
    assert f"default is {DEFAULT_COMPLETION_TOKENS} tokens" in told


def test_routes_that_are_said_not_to_exist_do_not() -> None:
    lines = (ROOT / "docs/reliability.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith("| routes that do not exist"))
    named = set(re.findall(r"`(/v1/[a-z/]+)`", row))
    assert named
    assert not named & {route.path for route in ROUTES}


def test_the_python_versions_are_those_of_the_package() -> None:
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    for page in (ROOT / "README.md", ROOT / "docs/quickstart.md"):
        assert f"Python {least} or later" in page.read_text(), page.name


def test_nobody_is_told_to_install_the_package_of_another_project() -> None:
    """On the package index the name `penstock` is taken: ours is penstock-llm."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION == "penstock-llm"
    assert set(project["scripts"]) == {"penstock"}
    folders = (
        "bench",
        "cli",
        "config",
        "core",
        "demo",
        "deploy",
        "docs",
        "frontend",
        "gpu_worker",
        "ipc",
        "kernels",
        "lab",
        "models",
        "penstock",
        "tests",
    )
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "Dockerfile"]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".sh")]
    wrong = re.compile(r"pip install [^`\n]*\bpenstock(?!-llm|\w|/)|\bpenstock\\?\[(images|otel|ray|plan|dev)")
    told = [f"{path}: {found[0]}" for path in files if (found := wrong.search(path.read_text())) is not None]
    assert [line for line in told if not line.startswith(__file__)] == []
