"""What `/metrics` shows of the engines' reports: one metric, as data."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.ipc.messages import EngineStats


class EngineMetric(NamedTuple):
    """A metric that is read from an engine's latest report. A part lists its own as `METRICS` in its `metrics.py`."""

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str  # without what the text format adds
    about: str
    label: str  # empty: there is one value, under ""
    values: Callable[[EngineStats], Mapping[str, float]]  # by label

    def family(self, stats: EngineStats) -> Metric:
        """The metric with the values of this report."""
        family = self.kind(self.name, self.about, labels=[self.label] if self.label else [])
        for key, number in self.values(stats).items():
            family.add_metric([key] if self.label else [], number)
        return family


def fields(part: object | None, **names: str) -> dict[str, int]:
    """The given fields of a part's report, by label; empty if the engine does not have that part."""
    return {} if part is None else {label: getattr(part, name) for label, name in names.items()}
