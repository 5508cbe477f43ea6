"""The metrics of a batch runner."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class BatchMetrics:
    """The metrics of one runner."""

    def __init__(
        self, registry: CollectorRegistry, num_requests: Callable[[], float], num_batches: Callable[[], float]
    ) -> None:
        """`num_requests` and `num_batches` return how many are in progress."""
        self.answered = Counter(
            "penstock_batch_requests", "Requests of batches, by their outcome.", ["outcome"], registry=registry
        )
        self.retries = Counter("penstock_batch_retries", "Requests of batches that were sent again.", registry=registry)
        Gauge("penstock_num_batch_requests", "Requests of batches under way.", registry=registry).set_function(
            num_requests
        )
        Gauge("penstock_num_batches", "Batches that this server runs.", registry=registry).set_function(num_batches)
