"""What adapters are used for, in `/metrics`: one line for each of them, up to a limit."""

from collections import Counter
from functools import partial

import prometheus_client
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.frontend.api.service import Service
from penstock.frontend.exchange.metrics import Metrics
from penstock.frontend.exchange.replies import Billed, RequestRecord
from penstock.frontend.exchange.vllm_names import LIVE_BY_ADAPTER
from penstock.parts.adapters.keys import name_of

MAX_ADAPTERS, OTHERS = 1000, "(others)"
"""Adapters with totals of their own; all further ones share one. (They may come and go many times.)"""

_TOTALS = {
    "requests": "Requests to an adapter.",
    "prompt_tokens": "Prompt tokens of requests to an adapter.",
    "generation_tokens": "Tokens generated with an adapter.",
    "device_seconds": "Parts of the steps' times that requests to an adapter took.",
    "kv_byte_seconds": "Bytes of KV pages that requests to an adapter held, over the time for which they held them.",
    "price": "Price of the device seconds of an adapter, with --price-per-hour.",
}


class Live(Collector):
    """How many requests each adapter has now; without a line for those that have none."""

    def __init__(self, service: Service) -> None:
        """It is registered with the frontend's metrics."""
        self._service = service
        service.metrics.registry.register(self)

    def collect(self) -> list[Metric]:
        about = "Requests to an adapter that are in progress."
        family = GaugeMetricFamily(LIVE_BY_ADAPTER, about, labels=["adapter"])
        for name, count in Counter(name_of(each.adapter) for each in self._service.generations if each.adapter).items():
            family.add_metric([name], count)
        return [family]


class Totals:
    """Counters of one frontend, by the adapter's name."""

    def __init__(self, metrics: Metrics) -> None:
        """They are registered with the frontend's metrics."""
        self._price_per_hour = metrics.price_per_hour
        self._names: set[str] = set()
        self._counters = {
            name: prometheus_client.Counter(f"penstock_adapter_{name}", about, ["adapter"], registry=metrics.registry)
            for name, about in _TOTALS.items()
            if name != "price" or metrics.price_per_hour
        }

    def note(self, record: RequestRecord) -> None:
        """Count a request that has ended, and its bill when it has come."""
        name = record.adapter
        if name not in self._names:
            if len(self._names) >= MAX_ADAPTERS:
                name = OTHERS
            self._names.add(name)
        self._add(name, requests=1, prompt_tokens=record.num_prompt_tokens, generation_tokens=record.num_output_tokens)
        if record.bill is not None:
            record.bill.when_complete(partial(self._note_bill, name, record.bill))

    def _note_bill(self, name: str, bill: Billed) -> None:
        self._add(name, device_seconds=bill.device_seconds, kv_byte_seconds=bill.kv_byte_seconds)
        if self._price_per_hour:
            self._add(name, price=bill.price(self._price_per_hour))

    def _add(self, adapter: str, **values: float) -> None:
        for name, value in values.items():
            self._counters[name].labels(adapter).inc(value)
