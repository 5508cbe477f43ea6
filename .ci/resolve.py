#!/usr/bin/env python3
"""Whether everybody else can install this: resolves the requirements as the public package index has them.

Base, base without the pinned versions, and every extra, for each Python version that pyproject.toml names, on x86-64
and ARM. Nothing is downloaded but metadata. This machine's own settings of pip and uv (wheels on its disk, mirrors,
constraints) are left out, because they can hide that two pinned versions contradict each other.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")  # llguidance has wheels for no older glibc
UNREACHABLE = re.compile(r"Failed to fetch|error sending request|dns error|client error \(Connect\)")
NUM_AT_ONCE = 12  # most of the time is waiting for the index
KEPT = ("UV_CACHE_DIR", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")


def requirements(project: dict[str, dict[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """What to resolve: a name for it, and uv's arguments."""
    pinned = ["pyproject.toml", "-c", "constraints.txt"]
    yield "base", [*pinned, "--only-binary", ":all:"]  # nobody is to need a compiler
    yield "base without pins", ["pyproject.toml"]
    for extra in project["optional-dependencies"]:
        yield f"[{extra}]", [*pinned, "--extra", extra]
    yield "tests/agents", ["tests/agents/requirements.txt"]


def main() -> int:
    """Print what cannot be installed, and why; the exit status is the verdict."""
    uv = shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)
    if uv is None:
        print("resolve: skipped, because uv is not installed and could not be fetched from a package index")
        return 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    versions = [match[1] for line in project["classifiers"] if (match := re.fullmatch(pattern, line))]
    cases = [
        (
            f"{name}, Python {version}, {platform}",
            [*arguments, "--python-version", version, "--python-platform", platform],
        )
        for name, arguments in requirements(project)
        for version in versions
        for platform in PLATFORMS
    ]
    environment = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith("UV_")}

    def run(arguments: list[str]) -> str:
        command = [uv, "pip", "compile", "--quiet", "--no-config", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""

    def resolve(arguments: list[str]) -> str:
        """Why it fails, or nothing. A release's metadata never changes: what is cached is not asked for again."""
        return run([*arguments, "--offline"]) and run(arguments)

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        failures = [
            (case, error)
            for (case, _), error in zip(cases, threads.map(resolve, (a for _, a in cases)), strict=True)
            if error
        ]
    if failures and all(UNREACHABLE.search(error) for _, error in failures):
        print("resolve: skipped, because no package index can be reached from here")
        return 0
    for case, error in failures:
        print(f"resolve: {case} cannot be installed\n{error}\n", file=sys.stderr)
    print(f"resolve: {len(cases) - len(failures)} of {len(cases)} can be installed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
