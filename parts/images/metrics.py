"""What `/metrics` shows of images."""

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from penstock.frontend.exchange.engine_metric import EngineMetric, fields

METRICS = (
    EngineMetric(
        GaugeMetricFamily, "penstock_image_embeddings",
        "Images that the worker has embedded, and those that it is to embed.", "state",
        lambda s: fields(s.images, all="num_embeddings", under_way="num_under_way"),
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_image_embedding_bytes",
        "Bytes of these embeddings, and their limit.", "of",
        lambda s: fields(s.images, used="num_bytes", most="max_bytes"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_images",
        "Images that prompts showed: encoded for them, or found embedded already.", "result",
        lambda s: fields(s.images, encoded="num_encoded", found="num_found"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_image_encode_us",
        "Microseconds of the device for encoding images.", "of", lambda s: fields(s.images, images="num_encode_us"),
    ),
)  # fmt: skip
