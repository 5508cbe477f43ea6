"""What `/metrics` shows of the disk tier."""

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from penstock.frontend.exchange.engine_metric import EngineMetric

METRICS = (
    EngineMetric(
        GaugeMetricFamily,
        "penstock_disk_kv_places",
        "Places for KV pages on the disk.",
        "",
        lambda s: {"": s.disk.num_places},
    ),
    EngineMetric(
        GaugeMetricFamily,
        "penstock_disk_kv_cached_pages",
        "Places that hold a page.",
        "",
        lambda s: {"": s.disk.num_cached},
    ),
    EngineMetric(
        GaugeMetricFamily,
        "penstock_disk_kv_pages_to_write",
        "Pages that are to be written to the disk.",
        "",
        lambda s: {"": s.disk.num_to_write},
    ),
    EngineMetric(
        GaugeMetricFamily,
        "penstock_disk_kv_requests_waiting",
        "Requests that wait for pages from the disk.",
        "",
        lambda s: {"": s.disk.num_waiting},
    ),
    EngineMetric(
        GaugeMetricFamily,
        "penstock_disk_kv_writing",
        "1 while pages are written to the disk: 0 without a disk tier, and after a write has failed.",
        "",
        lambda s: {"": int(s.disk.is_writing)},
    ),
    EngineMetric(
        CounterMetricFamily,
        "penstock_disk_kv_stored_pages",
        "Pages written to the disk.",
        "",
        lambda s: {"": s.disk.num_stored},
    ),
    EngineMetric(
        CounterMetricFamily,
        "penstock_disk_kv_loaded_pages",
        "Pages read from the disk.",
        "",
        lambda s: {"": s.disk.num_loaded},
    ),
    EngineMetric(
        CounterMetricFamily,
        "penstock_disk_kv_damaged_pages",
        "Pages that could not be read from the disk, or were not what was written.",
        "",
        lambda s: {"": s.disk.num_damaged},
    ),
    EngineMetric(
        CounterMetricFamily,
        "penstock_disk_kv_failed_pages",
        "Pages that could not be written to the disk.",
        "",
        lambda s: {"": s.disk.num_failed},
    ),
    EngineMetric(
        CounterMetricFamily,
        "penstock_disk_kv_given_up",
        "Requests that computed their prefix because reading it took too long.",
        "",
        lambda s: {"": s.disk.num_given_up},
    ),
)
