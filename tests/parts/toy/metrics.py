"""What it shows of engines' reports."""

from prometheus_client.metrics_core import GaugeMetricFamily

from penstock.frontend.exchange.engine_metric import EngineMetric

METRICS = (EngineMetric(GaugeMetricFamily, "toy_rows", "Rows, as a toy counts them.", "", lambda s: {"": s.num_rows}),)
