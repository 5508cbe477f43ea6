"""Compiles the C++ kernels for this processor, and keeps the library in a cache folder.

`python -m penstock.kernels.native.build` does so ahead of time. Otherwise a worker does so when it starts. The
library's name contains a hash of its sources, compiler and processor. If one of these changes, a new library is
compiled.

With `--portable`, libraries for whole processor families are put beside the sources instead, for an image or a package
that runs on machines without a compiler. If no library was compiled for the machine itself, the best fitting one is
used. `--portable --machine aarch64 --into FOLDER` compiles for another machine, by Zig's cross-compiler (the package
`ziglang`) and for an old glibc: so are the libraries in Penstock's wheels made.

setup.py runs this file by its path, so it imports nothing but the standard library.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCE = "library.cpp"
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno")
_V4 = frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
_FAMILIES = {
    "x86_64": {
        "x86-64-v4-amx": _V4 | {"avx512_bf16", "avx512_vnni", "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16"},
        "x86-64-v4-bf16": _V4 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"},
        "x86-64-v4": _V4,
        "x86-64-v3": frozenset(("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")),
    },
    "aarch64": {
        "armv8.2-a": frozenset(("asimd", "asimdrdm", "atomics")),
        "armv8-a": frozenset(("asimd",)),
    },
}
"""Machine -> its processor families, the best first -> the features of each, by their names in /proc/cpuinfo."""
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi")
_MACHINE_FLAGS = {
    "x86-64-v4-amx": (*_BF16_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "x86-64-v4-bf16": _BF16_FLAGS,
}
"""The compiler's flag for a family whose name is not a flag."""
_ZIG_PROCESSORS = {
    "x86-64-v4-amx": "x86_64_v4+avx512bf16+avx512vnni+avx512vbmi+amx_tile+amx_int8+amx_bf16",
    "x86-64-v4-bf16": "x86_64_v4+avx512bf16+avx512vnni+avx512vbmi",
    "x86-64-v4": "x86_64_v4",
    "x86-64-v3": "x86_64_v3",
    "armv8.2-a": "generic+v8_2a",
    "armv8-a": "generic",
}
"""Family -> how Zig names it."""
_ZIG_GLIBC = "2.17"  # of 2012, as the platform tag manylinux_2_17 promises


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why in one sentence."""


def _cache_folder() -> Path:
    """As in config/cache_folder.py, which cannot be imported here."""
    if chosen := os.environ.get("PENSTOCK_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"


def built_library() -> Path | None:
    """The existing library for these sources and this processor, or its family, if there is one."""
    path = _library_path()
    if path is not None and path.is_file() and _is_ours(path):
        return path
    if path is None and (kept := _newest_kept()) is not None:
        return kept
    flags = set(_processor().split())
    fitting = (_portable_path(family) for family, needed in _families().items() if needed <= flags)
    return next((path for path in fitting if path.is_file()), None)


def build() -> Path:
    """Compile, unless a library exists already.

    Raises:
        BuildError: if there is no compiler, or it fails.
    """
    path = _library_path() or _newest_kept()
    if path is None:
        raise BuildError("the CPU kernels need a C++ compiler (c++, g++ or clang++), and none was found")
    if not (path.is_file() and _is_ours(path)):
        with _alone(path.parent):  # the workers of one server start together: one compiles, the others find it made
            if not (path.is_file() and _is_ours(path)):
                _compile("native", path)
    return path


def build_fitting(folder: Path) -> Path:
    """Compile for the best family that fits this processor and that the compiler knows, into `folder`.

    For an installation: unlike a library for this very processor, it may be copied to another machine.

    Raises:
        BuildError: if there is no compiler, it fails, or no family fits.
    """
    compiler = _needed_compiler()
    flags = set(_processor().split())
    errors = [BuildError(f"no known family of processors fits this one ({platform.machine()})")]
    for family in (family for family, needed in _families().items() if needed <= flags):
        path = folder / _portable_path(family).name
        try:
            _compile(family, path, _as_usual(compiler, family))
            path.chmod(0o755)
            return path
        except BuildError as error:
            errors.append(error)
    raise errors[-1]


def build_portable(machine: str = "", folder: Path | None = None) -> list[Path]:
    """Compile for each family of a machine.

    Args:
        machine: "x86_64" or "aarch64", compiled for by Zig and for an old glibc; empty: this one, by its own compiler.
        folder: where to put the libraries; None: beside the sources.

    Raises:
        BuildError: if there is no compiler, or it fails.
    """
    compiler = "" if machine else _needed_compiler()
    families = _FAMILIES.get(machine, {}) if machine else _families()
    if not families:
        raise BuildError(f"no processor families are known for {machine or platform.machine()}")
    made = []
    for family in families:
        path = (folder or _FOLDER) / _portable_path(family).name
        if not path.is_file():
            _compile(family, path, _by_zig(machine, family) if machine else _as_usual(compiler, family))
            path.chmod(0o755)
        made.append(path)
    return made


def _families() -> dict[str, frozenset[str]]:
    return _FAMILIES.get(platform.machine(), {})


def _needed_compiler() -> str:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("the CPU kernels need a C++ compiler (c++, g++ or clang++), and none was found")
    return compiler


def _as_usual(compiler: str, march: str) -> list[str]:
    return [compiler, *_MACHINE_FLAGS.get(march, (f"-march={march}",))]


def _by_zig(machine: str, family: str) -> list[str]:
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("compiling for other machines needs Zig's compiler: pip install ziglang")
    target = f"{machine}-linux-gnu.{_ZIG_GLIBC}"
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", target, f"-mcpu={_ZIG_PROCESSORS[family]}"]
    # Clang remarks on every vector type that the plain instruction set would pass otherwise: all callers are here.
    return [*zig, "-s", "-Wno-psabi"]


def _compile(march: str, path: Path, compiler: list[str] | None = None) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written under another name first, so that other processes see a whole library or none.
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            begin = compiler or _as_usual(find_compiler() or "", march)
            command = [*begin, *_FLAGS, *_more_flags(), "-o", str(made), str(_FOLDER / _SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise BuildError(f"compiling the CPU kernels failed: {done.stderr.strip()[-2000:]}")
            made.rename(path)
    except OSError as error:
        raise BuildError(f"the CPU kernels cannot be stored in {str(path.parent)!r}: {error.strerror}") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine compile at a time."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / ".compiling").open("w")
    except OSError as error:
        raise BuildError(f"the CPU kernels cannot be stored in {str(folder)!r}: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _more_flags() -> tuple[str, ...]:
    """Extra flags for tests that make the compiler check memory accesses and threads."""
    return tuple(shlex.split(os.environ.get("PENSTOCK_TEST_CXXFLAGS", "")))


def find_compiler() -> str | None:
    """The path of $CXX, or of the first usual compiler that is installed."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _library_path() -> Path | None:
    """Path of the library that this machine's compiler makes; None without a compiler."""
    compiler = find_compiler()
    if compiler is None:
        return None
    stat = os.stat(compiler)
    made_by = hashlib.sha256(repr((compiler, stat.st_size, stat.st_mtime_ns)).encode())
    return _cache_folder() / f"{_native_name()}-{made_by.hexdigest()[:8]}.so"


def _newest_kept() -> Path | None:
    """Without a compiler, any compiler's library will do: the newest one for these sources and this processor."""
    found = [path for path in _cache_folder().glob(f"{_native_name()}-*.so") if path.is_file() and _is_ours(path)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _native_name() -> str:
    digest = _digest_of_sources()
    digest.update(repr((_FLAGS + _more_flags(), _processor())).encode())
    return f"kernels-{digest.hexdigest()[:24]}"


def _portable_path(family: str) -> Path:
    digest = _digest_of_sources()
    digest.update(repr(_FLAGS).encode())
    return _FOLDER / f"kernels-{family}-{digest.hexdigest()[:24]}.so"


def _digest_of_sources() -> "hashlib._Hash":
    digest = hashlib.sha256()
    for path in sorted((*_FOLDER.glob("*.cpp"), *_FOLDER.rglob("*.h"))):
        digest.update(path.read_bytes())
    return digest


def _processor() -> str:
    """A description of the processor, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return "\n".join(sorted(kept))


def _is_ours(path: Path) -> bool:
    """Whether no other user could have written the file; otherwise it is not loaded."""
    stat = path.stat()
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


def main() -> int:
    """Build, and print where the libraries are."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("--portable", action="store_true", help="for processor families, beside the sources")
    parser.add_argument("--machine", choices=_FAMILIES, default="", help="with --portable: for another one, by Zig")
    parser.add_argument("--into", type=Path, help="with --portable: the folder (default: beside the sources)")
    args = parser.parse_args()
    try:
        for path in build_portable(args.machine, args.into) if args.portable else [build()]:
            print(f"CPU kernels: {path}")
    except BuildError as error:
        print(f"CPU kernels: not built, the torch kernels will be used; {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
