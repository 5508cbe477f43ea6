"""The checks of `penstock doctor` that need no torch: versions, processor, memory, limits; each with advice."""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.config.sizes import size
from penstock.ipc.version import DISTRIBUTION, NAME

Level = Literal["fine", "note", "slow", "broken"]
"""`note`: information; `slow`: serves, but slower than possible; `broken`: cannot serve."""

FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""Processor features that kernels use, by their names in /proc/cpuinfo."""

_LEAST_FILES = 4096
_LEAST_SHM = 64 << 20
_BUSY = 0.5
"""Load average per core above which the machine is too busy for reliable figures."""


class Finding(NamedTuple):
    """The result of one check."""

    level: Level
    title: str
    text: str
    advice: str = ""  # what to do


def all_checks(root: Path = Path("/")) -> Iterator[Finding]:
    """Run all checks; `root` is where the system's files are."""
    yield from packages()
    yield processor(root)
    yield from cores(root)
    yield from memory(root)
    yield huge_pages(root)
    yield open_files()
    yield shared_memory(root)
    yield folders()
    yield port()


def packages() -> Iterator[Finding]:
    """Whether the installed packages are what this version needs."""
    from packaging.requirements import InvalidRequirement, Requirement  # nothing else needs it

    if sys.platform != "linux":
        yield Finding("broken", "system", platform.platform(), "servers need Linux; `penstock chat` runs anywhere")
    else:
        yield Finding("fine", "system", f"{platform.platform()}, Python {platform.python_version()}")
    try:
        required, needs_python = (
            metadata.requires(DISTRIBUTION) or [],
            metadata.metadata(DISTRIBUTION)["Requires-Python"],
        )
    except metadata.PackageNotFoundError:
        yield Finding("note", "packages", "run from a source tree: versions are not checked", "pip install -e .")
        return
    if needs_python and not Requirement(f"python{needs_python}").specifier.contains(platform.python_version()):
        yield Finding("broken", "Python", f"{platform.python_version()}, but {needs_python} is needed", "install it")
    wrong, shown, num_checked = [], [], 0
    for line in required:
        try:
            needed = Requirement(line)
        except InvalidRequirement:
            continue
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        num_checked += 1
        try:
            there = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is missing, {needed.specifier} is needed")
            continue
        if needed.name in ("torch", "triton"):
            shown.append(f"{needed.name} {there}")
        if not needed.specifier.contains(there, prereleases=True):
            wrong.append(f"{needed.name} is {there}, {needed.specifier} is needed")
    for sentence in wrong:
        yield Finding("broken", "packages", sentence, f"pip install --upgrade {DISTRIBUTION}")
    if not wrong:
        yield Finding("fine", "packages", f"{', '.join(shown)}; all {num_checked} requirements are met")


def processor(root: Path = Path("/")) -> Finding:
    """The processor's name, and its features that kernels use."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    has = [name for name in FEATURES if name in flags]
    name = fields.get("model name") or platform.processor() or platform.machine()
    text = f"{name}: {' '.join(has) or 'no vector features that kernels use'}"
    if flags and not flags & {"avx2", "asimd"}:
        return Finding(
            "slow", "processor", text, "kernels need AVX2 or Advanced SIMD to be fast; a GPU, or a newer processor"
        )
    return Finding("fine", "processor", text)


def cores(root: Path = Path("/")) -> Iterator[Finding]:
    """How many cores this process may use, and whether other processes use them."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1
    text = f"{usable} of {there}, {nodes} NUMA node{'s' * (nodes > 1)}"
    if quota.isdigit() and period.isdigit() and int(quota) < 0.9 * usable * int(period):
        allowed = int(quota) / int(period)
        yield Finding(
            "slow", "cores", f"{text}; the control group allows the time of {allowed:g}",
            f"--num-threads {max(int(allowed), 1)}, or a higher limit: more threads than cores wait for each other",
        )  # fmt: skip
    else:
        yield Finding("fine", "cores", text)
    busy = os.getloadavg()[0]
    if busy > _BUSY * usable:
        yield Finding(
            "note",
            "load",
            f"{busy:.1f}: other processes use this machine",
            "figures below are of a busy machine: run it again when it is quiet",
        )
    governor = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    if governor == "powersave":
        yield Finding("note", "clock", "the governor is powersave", "cpupower frequency-set -g performance")


def memory(root: Path = Path("/")) -> Iterator[Finding]:
    """The machine's memory, and what a control group leaves of it."""
    found = memory_bytes(root)
    if found is None:
        return
    total, available = found
    yield Finding("fine", "memory", f"{size(available)} available of {size(total)}")


def memory_bytes(root: Path = Path("/")) -> tuple[int, int] | None:
    """Total memory, and the part available to this process; None if the system does not say."""
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    try:
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):
        return None
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    used = _read(root / "sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit() and int(limit) < total:
        total, available = int(limit), min(available, max(int(limit) - int(used), 0))
    return total, available


def huge_pages(root: Path = Path("/")) -> Finding:
    """Whether huge pages are on: weights are read a tenth to a third faster from pages of 2 MiB."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    text = _read(path)
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("fine", "huge pages", chosen)
    said = chosen or "not offered by this kernel"
    return Finding("slow", "huge pages", f"{said}: weights are read more slowly", f"echo madvise | sudo tee {path}")


def open_files() -> Finding:
    """The limit of open files: each connection is one; a server raises its own limit as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    text = f"{soft:,}, which a server may raise to {most}"
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        advice = f"ulimit -Hn {_LEAST_FILES}; LimitNOFILE= of systemd, --ulimit nofile= of Docker"
        return Finding("slow", "open files", f"{text}: there can be few connections", advice)
    return Finding("fine", "open files", text)


def shared_memory(root: Path = Path("/")) -> Finding:
    """Shared memory, over which the ranks of a group communicate."""
    folder = root / "dev/shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Finding(
            "slow",
            "shared memory",
            "there is no /dev/shm",
            "mount -t tmpfs tmpfs /dev/shm, if several GPUs serve a model",
        )
    text = f"{size(usage.free)} free of {size(usage.total)} in /dev/shm"
    if usage.free < _LEAST_SHM:
        return Finding("slow", "shared memory", text, "--shm-size 1g of Docker, if several GPUs serve a model")
    return Finding("fine", "shared memory", text)


def folders() -> Finding:
    """Whether there is a folder for temporary files, which sockets and helpers need."""
    try:
        with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
            return Finding("fine", "temporary files", str(Path(folder).parent))
    except OSError as error:
        return Finding(
            "broken", "temporary files", str(error), "TMPDIR names a folder that can be written to; --runtime-dir"
        )


def port(number: int = 8000) -> Finding:
    """Whether the usual port is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
        except OSError:
            return Finding(
                "note", "port", f"{number} is in use: perhaps a server runs already", "--port names another one"
            )
    return Finding("fine", "port", f"{number} is free")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
