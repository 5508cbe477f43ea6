"""Installs coding agents for terminals, each once, into a folder of its own in the user's cache.

They come from npm or the Python package index, in the versions named here, and run as they are.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_SECONDS = 900.0


class NotInstallableError(Exception):
    """It cannot be installed here; the message says why in one sentence."""


@dataclass(frozen=True)
class Package:
    """A package with a command line."""

    source: Literal["npm", "pip"]
    name: str
    version: str
    command: str


def installed(package: Package) -> Path:
    """The path of the package's command, installed if it is not there yet.

    Raises:
        NotInstallableError: without npm, or without an index that has it.
    """
    folder = cache() / f"{package.name.replace('/', '+')}-{package.version}"
    command = folder / ("node_modules/.bin" if package.source == "npm" else "bin") / package.command
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:  # tests of several processes may want the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".made").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _install(package, folder)
            if not command.exists():
                raise NotInstallableError(f"{package.name} {package.version} has no command {package.command!r}")
            (folder / ".made").touch()
    return command


def _install(package: Package, folder: Path) -> None:
    if package.source == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise NotInstallableError(f"{package.name} needs npm, which is not installed here")
        (folder / "package.json").write_text("{}")  # otherwise npm looks for one in the folders above
        options = ("--no-audit", "--no-fund", "--silent", "--prefix", str(folder))
        steps = [[npm, "install", *options, f"{package.name}@{package.version}"]]
    else:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile"]
        steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, f"{package.name}=={package.version}"]]
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise NotInstallableError(f"{package.name} is not installed after {_SECONDS:g} seconds") from None
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
            raise NotInstallableError(f"{package.name} {package.version} cannot be installed: {last}")


def cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "penstock" / "tests" / "agents"
