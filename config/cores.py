"""Which of this machine's cores a worker gets, if several share it."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")


def cores_of_worker(
    number: int, count: int, usable: Collection[int] | None = None, nodes: Path = _NODES, cpus: Path = _CPUS
) -> tuple[int, ...]:
    """The cores to which a worker keeps, on a machine with several NUMA nodes; empty: it need not keep to any.

    A worker on a node of its own reads its weights from that node's memory. Nodes are shared out evenly; a part of one
    is a part of its memory's bandwidth. Threads of one core are never of two workers, as far as numbers allow.

    Args:
        number: of the worker.
        count: of workers on the machine.
        usable: cores of this process; None: those that the system says.
        nodes: where the system describes its nodes, and
        cpus: its cores.
    """
    usable = os.sched_getaffinity(0) if usable is None else set(usable)
    by_node = [
        sorted(usable & _listed(node / "cpulist"), key=lambda core: (_first_thread(cpus, core), core))
        for node in sorted(nodes.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    ]
    ordered = [core for cores in by_node for core in cores]
    if sum(map(bool, by_node)) < 2 or len(ordered) < max(count, len(usable)):
        return ()
    return tuple(ordered[len(ordered) * number // count : len(ordered) * (number + 1) // count])


def _first_thread(cpus: Path, core: int) -> int:
    """The lowest number among the threads of a core."""
    return min(_listed(cpus / f"cpu{core}" / "topology" / "thread_siblings_list"), default=core)


def _listed(file: Path) -> set[int]:
    """Numbers in a file of the form 0-3,8."""
    try:
        text = file.read_text().strip()
    except OSError:
        return set()
    return {number for part in text.split(",") if part for number in _range(part.split("-"))}


def _range(ends: list[str]) -> Iterable[int]:
    return range(int(ends[0]), int(ends[-1]) + 1)
