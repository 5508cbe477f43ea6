#!/usr/bin/env python3
"""Makes a release's files in dist/: a wheel for each machine, with compiled CPU kernels inside, and the sources.

The kernels are compiled by Zig's cross-compiler (the package `ziglang`) for glibc 2.17, so that one machine makes the
wheels for all. What comes out is checked: a wheel must hold every library that its machine's families have.
"""

import os
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
        names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
        if len(names) != number:
            print(f"{wheel} holds {len(names)} libraries instead of {number}", file=sys.stderr)
            return 1
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
