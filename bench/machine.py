"""What a measurement has to tell of the machine it ran on."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def commit(folder: Path = _HERE) -> str:
    """The commit of the source in a folder, if it is a clone."""
    asked = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def command(module: str, argv: Sequence[str] | None) -> str:
    """What a user types to run this; `argv` as `main` gets it, None: the process's own arguments."""
    return shlex.join(["python", "-m", module, *(sys.argv[1:] if argv is None else argv)])


def processor() -> str:
    """What the system calls it."""
    named = _cpuinfo("model name")
    return f"{os.cpu_count()} x {named or platform.processor()}"


def machine() -> dict[str, Any]:
    """For a record: processor, features that matter for speed, memory in GB, huge pages, load average of a minute."""
    flags = _cpuinfo("flags").split()
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "processor": processor(),
        "features": [name for name in _FEATURES if name in flags],
        "has_amx": "amx_bf16" in flags,
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "huge_pages": huge_pages.read_text().strip() if huge_pages.is_file() else "unknown",
        "load_before": os.getloadavg()[0],
    }


def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")
