"""Memory, descriptors and threads of every process over time, and whether they grow."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

from tests.e2e.servers import Server


class Sample(NamedTuple):
    at: float  # seconds, monotonic
    rss: float  # MiB
    fds: int
    threads: int


@dataclass
class Watch:
    """Samples by process name and id: a process that was replaced begins anew."""

    server: Server
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)

    def look(self) -> None:
        """Take a sample of each process."""
        now = time.monotonic()
        processes = {"penstock-supervisor": psutil.Process(self.server.process.pid), **self.server.children()}
        for name, process in processes.items():
            if not name.startswith("penstock-"):
                continue  # it has not begun yet
            try:
                rss = process.memory_info().rss / 2**20
                sample = Sample(now, rss, process.num_fds(), process.num_threads())
            except psutil.Error:  # it died this moment
                continue
            self.samples.setdefault((name, process.pid), []).append(sample)

    def report(self) -> dict[str, dict[str, float]]:
        """Of each name's longest-lived process: figures at a quarter of its life, at its end, and the slope between."""
        longest: dict[str, list[Sample]] = {}
        for (name, _), samples in self.samples.items():
            if len(samples) > len(longest.get(name, ())):
                longest[name] = samples
        found = {}
        for name, samples in longest.items():
            settled = samples[len(samples) // 4 :]
            first, last = settled[0], settled[-1]
            found[name] = {
                "rss_mib": round(first.rss, 1),
                "rss_mib_at_end": round(last.rss, 1),
                "rss_mib_per_hour": round(3600 * slope(settled), 2),
                "fds": first.fds,
                "fds_at_end": last.fds,
                "threads": first.threads,
                "threads_at_end": last.threads,
                "seconds": round(last.at - first.at),
            }
        return found


def slope(samples: list[Sample]) -> float:
    """MiB per second, by least squares."""
    n = len(samples)
    mean_at, mean_rss = sum(s.at for s in samples) / n, sum(s.rss for s in samples) / n
    spread = sum((s.at - mean_at) ** 2 for s in samples)
    return sum((s.at - mean_at) * (s.rss - mean_rss) for s in samples) / spread if spread else 0.0
