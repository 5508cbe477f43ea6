"""The names that `/metrics` tells."""

from typing import Any

from penstock.frontend.exchange.metrics import EngineCollector, Metrics
from penstock.ipc.messages import EngineStats


def metric_names() -> set[str]:
    """Of all metrics, with and without what the text format adds to a name."""
    values: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
    stats = EngineStats(**values)
    names = {m.name for m in EngineCollector(lambda: {"0": stats}).collect()}
    names |= {line.split()[2] for line in Metrics(dict).exposition().decode().splitlines() if "# TYPE" in line}
    return names | {f"{name}{end}" for name in names for end in ("_total", "_bucket", "_sum", "_count")}
