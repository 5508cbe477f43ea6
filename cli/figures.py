"""A server's metrics as numbers: sums over its engines, and rates and percentiles between two samples."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
_PREFIX = "penstock_"


@dataclass(frozen=True)
class Look:
    """All metrics at one moment; names without their prefix."""

    samples: Mapping[tuple[str, Labels], float]
    at: float = field(default_factory=time.monotonic)

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        wanted = set(labels.items())
        return sum(value for (found, has), value in self.samples.items() if found == name and wanted <= set(has))

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's sums by the values of a label."""
        found: dict[str, float] = {}
        for (metric, has), value in self.samples.items():
            if metric == name and label in dict(has):
                key = dict(has)[label]
                found[key] = found.get(key, 0.0) + value
        return found


def read_look(text: str) -> Look:
    """Parse the text of /metrics.

    Raises:
        ValueError: it is not Prometheus' text format.
    """
    samples: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name.removeprefix(_PREFIX), tuple(sorted(sample.labels.items()))
            samples[key] = samples.get(key, 0.0) + sample.value
    return Look(samples)


@dataclass(frozen=True)
class Span:
    """The time between two looks. A counter that fell belongs to a restarted process, and counts from zero."""

    before: Look
    after: Look

    @property
    def seconds(self) -> float:
        return max(self.after.at - self.before.at, 1e-9)

    def count(self, name: str, **labels: str) -> float:
        """How much a counter grew."""
        grown = self.after.total(name, **labels) - self.before.total(name, **labels)
        return grown if grown >= 0 else self.after.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """How much a counter grew per second."""
        return self.count(name, **labels) / self.seconds

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """How much a counter grew, by the values of a label."""
        return {value: self.count(name, **{label: value}) for value in self.after.by(name, label)}

    def percentiles(self, name: str, *wanted: float) -> tuple[float | None, ...]:
        """Percentiles of a histogram; None if nothing was counted."""
        bounds = {
            float(bound): self.count(f"{name}_bucket", le=bound) for bound in self.after.by(f"{name}_bucket", "le")
        }
        return tuple(quantile(bounds, share) for share in wanted)


def quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    """A quantile from cumulative counts, interpolated within a bucket like Prometheus' `histogram_quantile`.

    None if nothing was counted; values above the last finite bound count as that bound.
    """
    bounds = sorted(cumulative)
    if not bounds or not cumulative[bounds[-1]]:
        return None
    rank = share * cumulative[bounds[-1]]
    low = counted = 0.0
    for bound in bounds:
        if cumulative[bound] >= rank and cumulative[bound] > counted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - counted) / (cumulative[bound] - counted)
        low, counted = bound, cumulative[bound]
    return low


def seconds(value: float | None) -> str:
    """Format a time, with three digits."""
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1e3:.3g} ms" if value < 0.9995 else "1 s"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.0f} min"


def number(value: float) -> str:
    """Format a count or a rate."""
    if value >= 1e5:
        for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if value >= unit:
                return f"{value / unit:.1f}{name}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
