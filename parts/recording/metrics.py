"""What `/metrics` shows of the recording."""

from prometheus_client.metrics_core import CounterMetricFamily

from penstock.frontend.exchange.engine_metric import EngineMetric

METRICS = (
    EngineMetric(
        CounterMetricFamily,
        "penstock_engine_recording_lines_lost",
        "Lines of the recording that could not be written.",
        "",
        lambda s: {"": s.num_recording_lines_lost},
    ),
)
