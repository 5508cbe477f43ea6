#!/usr/bin/env python3
"""Makes a release's files in dist/: a wheel for each machine, with compiled CPU kernels inside, and the sources.

The kernels are compiled by Zig's cross-compiler (the package `ziglang`) for glibc 2.17, so that one machine makes the
wheels for all. What comes out is checked: a wheel must hold every library that its machine's families have, and each
library every function that Python calls. (A library for another machine cannot be loaded here.)
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST, BUILT = ROOT / "dist", ROOT / "build" / "kernels"
LIBRARIES = {"x86_64": 4, "aarch64": 2}
"""Machine -> how many families of processors there are, each with a library of its own."""


def run(*command: str | Path, **variables: str) -> None:
    """Run a command that must succeed, in the clone."""
    subprocess.run([str(word) for word in command], cwd=ROOT, env=os.environ | variables, check=True)


def functions() -> set[str]:
    """The names of what the kernels' sources export."""
    source = (ROOT / "kernels" / "native" / "library.cpp").read_text()
    return set(re.findall(r"\b(penstock_\w+)\(", source))


def complaint(wheel: Path, number: int) -> str:
    """What is wrong with a wheel that should hold this many libraries, if anything."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    if len(libraries) != number:
        return f"it holds {len(libraries)} libraries instead of {number}"
    for name, library in libraries.items():
        lost = sorted(function for function in functions() if f"\0{function}\0".encode() not in library)
        if lost:
            return f"{name} lacks {', '.join(lost)}"
    return ""


def main() -> int:
    """Compile, pack and check."""
    for machine, number in LIBRARIES.items():
        kernels = BUILT / machine
        build = ROOT / "kernels" / "native" / "build.py"
        run(sys.executable, build, "--portable", "--machine", machine, "--into", kernels)
        tag = f"manylinux_2_17_{machine}"
        variables = {"PENSTOCK_KERNELS": str(kernels), "PENSTOCK_WHEEL_PLATFORM": tag}
        run(sys.executable, "-m", "build", "--wheel", "--outdir", DIST, ROOT, **variables)
        wheel = max(DIST.glob(f"*{tag}.whl"), key=lambda path: path.stat().st_mtime_ns)
        if wrong := complaint(wheel, number):
            print(f"{wheel}: {wrong}", file=sys.stderr)
            return 1
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
