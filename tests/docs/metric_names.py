"""The names that `/metrics` tells."""

from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import fields

from penstock.frontend.api.service import Service
from penstock.frontend.engine.router.metrics import RouterMetrics
from penstock.frontend.exchange.engine_metrics import EngineCollector
from penstock.frontend.exchange.metrics import Metrics
from penstock.ipc.messages import EngineStats
from penstock.parts.adapters.frontend.totals import Live, Totals
from penstock.parts.batches.frontend.metrics import BatchMetrics


def metric_names() -> set[str]:
    """Of all metrics, with and without what the text format adds to a name."""
    values: dict[str, Any] = {field.name: 0 for field in fields(EngineStats) if field.required}
    stats = EngineStats(**values)
    names = {m.name for m in EngineCollector(lambda: {"0": stats}).collect()}
    metrics = Metrics(dict, price_per_hour=1.0)
    RouterMetrics(metrics.registry)
    BatchMetrics(metrics.registry, float, float)
    Totals(metrics)
    Live(cast(Service, SimpleNamespace(metrics=metrics, generations=())))
    names |= {line.split()[2] for line in metrics.exposition().decode().splitlines() if "# TYPE" in line}
    return names | {f"{name}{end}" for name in names for end in ("_total", "_bucket", "_sum", "_count")}
