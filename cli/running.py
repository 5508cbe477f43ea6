"""The servers that run on this machine, by what the system tells of this user's processes."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from penstock.cli.engines import RefusedError, Server
from penstock.cli.figures import read_look

_SERVER = re.compile(r"penstock-(supervisor|frontend-\d+)")
"""Processes by the names that they give themselves."""

_FRONTEND = "penstock-frontend-"
_LISTENING = "0A"
_ANSWER_SECONDS = 2.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


class _Process(NamedTuple):
    pid: int
    parent: int
    name: str


class Running:
    """A server: a supervisor with its processes, or a frontend that was started alone."""

    def __init__(self, pid: int, processes: list[_Process], proc: Path) -> None:
        """
        Args:
            pid: of the process that is the server to the system.
            processes: this one, and those below it.
            proc: where the system tells about processes.
        """
        self.pid = pid
        self._processes = processes
        self._proc = proc

    @cached_property
    def urls(self) -> list[str]:
        """Where it listens; the first is where clients ask. Empty while it starts."""
        inodes = {
            inode
            for process in self._processes
            if process.name.startswith(_FRONTEND)
            for inode in _sockets(self._proc / str(process.pid))
        }
        found = {port: host for host, port, inode in _listeners(self._proc) if inode in inodes}
        return [f"http://{_ANY.get(host, host)}:{port}" for port, host in sorted(found.items())]

    @property
    def memory_bytes(self) -> int:
        """Host memory of all its processes; what several of them share is counted once."""
        total = 0
        for process in self._processes:
            with suppress(OSError):  # it has ended
                text = (self._proc / str(process.pid) / "smaps_rollup").read_text()
                if found := re.search(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE):
                    total += int(found[1]) << 10
        return total

    @property
    def uptime_seconds(self) -> float:
        """Time since its start."""
        begun = int(_stat(self._proc / str(self.pid))[19]) / os.sysconf("SC_CLK_TCK")
        return float((self._proc / "uptime").read_text().split()[0]) - begun

    def asked(self, key: str) -> "Answers":
        """What it answers to a client with this API key."""
        reason = ""
        for url in (each for plain in self.urls for each in (plain, plain.replace("http:", "https:"))):
            server = Server(url, key, _ANSWER_SECONDS)
            try:
                models = server.get("/v1/models")["data"]
                names = tuple(str(model["id"]) for model in models)
                has_gpu = models[0].get("kernels") == "triton"
            except RefusedError as error:
                reason = reason or ("wants an API key" if error.wants_key else str(error))
                continue
            except (LookupError, TypeError, AttributeError):  # it is no server of ours
                continue
            return Answers(url, names, _device_bytes(server) if has_gpu else 0.0)
        return Answers(self.urls[0] if self.urls else "", (), 0.0, reason or "starting")


class Answers(NamedTuple):
    """What a server says of itself."""

    url: str  # empty: it does not listen yet
    models: tuple[str, ...]  # the names that it answers to
    device_bytes: float  # in use on its GPUs; 0: it has none, or does not tell
    reason: str = ""  # why it names no model


def running(proc: Path = Path("/proc")) -> list[Running]:
    """Find this user's servers, in the order of their starts; `proc` is where the system tells about processes."""
    processes = {process.pid: process for process in _processes(proc)}
    servers = {pid for pid, process in processes.items() if _SERVER.fullmatch(process.name)}
    found = []
    for pid in sorted(servers):
        if processes[pid].parent not in servers:
            found.append(Running(pid, [each for each in processes.values() if _is_below(each, pid, processes)], proc))
    return found


def _is_below(process: _Process, pid: int, processes: dict[int, _Process]) -> bool:
    while process.pid != pid:
        if process.parent not in processes:
            return False
        process = processes[process.parent]
    return True


def _processes(proc: Path) -> Iterator[_Process]:
    for folder in proc.iterdir() if proc.is_dir() else ():  # Linux alone has it
        if folder.name.isdigit():
            with suppress(OSError, IndexError):  # it has ended, or is another user's
                if folder.stat().st_uid == os.getuid():
                    name = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
                    yield _Process(int(folder.name), int(_stat(folder)[1]), name)


def _stat(folder: Path) -> list[str]:
    """The fields of a process's `stat` behind its name, which may hold anything."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _sockets(folder: Path) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in (folder / "fd").iterdir():
            with suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                    yield found[1]


def _listeners(proc: Path) -> Iterator[tuple[str, int, str]]:
    """Hosts, ports and inodes of the sockets on which this machine listens."""
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    host, _, port = fields[1].partition(":")
                    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]  # little endian
                    shown = socket.inet_ntop(family, b"".join(words))
                    yield f"[{shown}]" if ":" in shown and shown != "::" else shown, int(port, 16), fields[9]


def _device_bytes(server: Server) -> float:
    """Memory in use on a server's GPUs."""
    with suppress(RefusedError, ValueError):
        look = read_look(server.text("/metrics"))
        return look.total("device_memory_used_bytes")
    return 0.0
