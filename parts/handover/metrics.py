"""What `/metrics` shows of handovers."""

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from penstock.frontend.exchange.engine_metric import EngineMetric, fields

METRICS = (
    EngineMetric(
        GaugeMetricFamily, "penstock_handover_requests",
        "Requests whose prompts are computed by another engine now.", "state",
        lambda s: fields(s.handover, waiting="num_waiting"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_handover_prompts",
        "Prompts received from other engines, sent to them, or computed here after a handover had failed.", "result",
        lambda s: fields(s.handover, received="num_received", sent="num_sent", failed="num_failed"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_handover_pages",
        "KV pages received from other engines, or sent to them.", "direction",
        lambda s: fields(s.handover, received="num_received_pages", sent="num_sent_pages"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_handover_bytes",
        "Bytes of KV read from other engines.", "direction",
        lambda s: fields(s.handover, received="num_received_bytes"),
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_handover_kept_pages",
        "Pages that are kept until another engine has read them.", "state",
        lambda s: fields(s.handover, kept="num_kept_pages"),
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_kv_transport_failed",
        "1 for each transport of KV pages that has failed between two workers and is switched off for them.",
        "transport",
        lambda s: dict.fromkeys(s.handover.failed_transports if s.handover else (), 1),
    ),
)  # fmt: skip
