"""Prometheus metrics from the engines' latest `EngineStats`: queue, rows, pages, tiers, parts."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.config.parts import metrics
from penstock.frontend.exchange.engine_metric import EngineMetric, fields
from penstock.ipc.messages import EngineStats


class EngineCollector(Collector):
    """The counters of the engines' latest `EngineStats`, labelled by engine where the label is not empty."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for label, stats in self._engines().items():
            for family in self._families(stats):
                if label:
                    family.samples = [
                        sample._replace(labels={"engine": label, **sample.labels}) for sample in family.samples
                    ]
                found.setdefault(family.name, family)
                if found[family.name] is not family:
                    found[family.name].samples += family.samples
        yield from found.values()

    def _families(self, stats: EngineStats) -> Iterator[Metric]:
        for name, (about, value) in _GAUGES.items():
            yield GaugeMetricFamily(name, about, value=value(stats))
        for name, (about, value) in _COUNTERS.items():
            yield CounterMetricFamily(name, about, value=value(stats))
        info = GaugeMetricFamily(
            "penstock_cache_config_info",
            "1; the labels are tokens of a page, and pages of the KV pool.",
            labels=("block_size", "num_gpu_blocks"),  # the labels that endpoint pickers of Kubernetes gateways read
        )
        info.add_metric((str(stats.page_size), str(stats.num_pages)), 1)
        yield info
        for metric in (*_LABELLED, *metrics()):
            yield metric.family(stats)


_Value = Callable[[EngineStats], float]


def _host(stats: EngineStats, **fields: str) -> dict[str, int]:
    """The given fields of the host tier, by label; empty without the tier."""
    host = stats.host_tier
    return {} if not host else {label: getattr(host, field) for label, field in fields.items()}


_GAUGES: dict[str, tuple[str, _Value]] = {
    "penstock_num_requests_waiting": ("Sequences that wait for a row.", lambda s: s.num_waiting),
    "penstock_num_requests_running": ("Sequences that hold a row.", lambda s: s.num_running),
    "penstock_num_waiting_tokens": ("Tokens of the sequences that wait for a row.", lambda s: s.num_waiting_tokens),
    "penstock_num_requests_paused": ("Requests whose clients do not read.", lambda s: s.num_paused),
    "penstock_num_rows": ("Rows of the worker, in use or free.", lambda s: s.num_rows),
    "penstock_num_pages": ("Pages of the KV pool.", lambda s: s.num_pages),
    "penstock_num_free_pages": ("Free pages.", lambda s: s.num_free_pages),
    "penstock_num_cached_pages": ("Pages owned only by the prefix cache.", lambda s: s.num_cached_pages),
    "penstock_num_used_pages": ("Pages in a running sequence's page table.", lambda s: s.num_used_pages),
    "penstock_kv_cache_usage_perc": (
        "Share of the pages that running sequences use (1 is all).",
        lambda s: s.num_used_pages / max(s.num_pages, 1),
    ),
    "penstock_kv_page_waste_perc": (
        "Share of the token positions in running sequences' pages that hold nothing yet (1 is all).",
        lambda s: s.num_unfilled_slots / max(s.num_page_slots, 1),
    ),
    "penstock_device_memory_used_bytes": (
        "Memory in use on the worker's device; on a CPU, by the worker.",
        lambda s: s.device_memory_used,
    ),
    "penstock_device_memory_total_bytes": ("Total memory of the worker's device.", lambda s: s.device_memory_total),
    "penstock_engine_draining": ("1 while the engine takes no new requests.", lambda s: int(s.is_draining)),
    "penstock_engine_ready": ("1 while a worker is serving.", lambda s: int(s.is_ready)),
}

_COUNTERS: dict[str, tuple[str, _Value]] = {
    "penstock_engine_steps": ("Forward passes.", lambda s: s.num_steps),
    "penstock_engine_device_seconds": ("Times of all steps.", lambda s: s.device_us * 1e-6),
    "penstock_invalid_logits": (
        "Sequences that ended because no token could be sampled from the model's logits.",
        lambda s: s.num_invalid_logits,
    ),
    "penstock_num_preemptions": (
        "Preemptions: sequences that lost their pages, and were recomputed or swapped.",
        lambda s: s.num_preemptions,
    ),
    "penstock_engine_prompt_tokens": ("Prompt tokens admitted.", lambda s: s.num_prompt_tokens),
    "penstock_prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    "penstock_engine_generation_tokens": ("Tokens generated.", lambda s: s.num_output_tokens),
    "penstock_engine_dropped_tokens": (
        "Tokens computed for sequences that had ended or lost their row in the meantime.",
        lambda s: s.num_dropped_tokens,
    ),
}

_LABELLED: tuple[EngineMetric, ...] = (
    EngineMetric(
        GaugeMetricFamily, "penstock_num_requests_waiting_by_reason",
        "Sequences that wait for a row, by reason.", "reason", lambda s: s.waiting_reasons or {},
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_engine_dropped_messages",
        "Messages that the engine could not read or did not expect from their sender, by socket.", "socket",
        lambda s: {
            "frontends": s.num_dropped_from_frontends, "workers": s.num_dropped_from_workers,
            "worker": s.num_dropped_by_worker,
        },
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_engine_log_lines_dropped",
        "Log lines that could not be written or that nobody read, by engine process.", "process",
        lambda s: {"scheduler": s.num_log_lines_dropped, "worker": s.num_log_lines_dropped_by_worker},
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_expert_tokens",
        "Tokens that the experts on a rank have computed, each layer's, with --enable-expert-parallel.", "rank",
        lambda s: s.expert_tokens or {},
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_expert_imbalance",
        "Tokens of the rank whose experts got the most, as a multiple of the mean, by layer, over the last minute.",
        "layer", lambda s: s.expert_imbalance or {},
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_kv_tier_failed",
        "1 for each tier of KV pages that is configured and could not be set up.", "tier",
        lambda s: dict.fromkeys(s.failed_tiers or (), 1),
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_state_snapshots",
        "Copies of rows' states at the ends of cached prefixes, and their limit.", "of",
        lambda s: fields(s.snapshots, used="num_used", most="num_places"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_state_snapshot_events",
        "How often one was saved, loaded into a row, or evicted for another.", "event",
        lambda s: fields(s.snapshots, saved="num_saved", loaded="num_loaded", evicted="num_evicted"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_state_prefix_misses",
        "Sequences that did not start as late in their prompts as they might have, by reason.", "reason",
        lambda s: s.snapshots.misses if s.snapshots else {},
    ),
    EngineMetric(
        GaugeMetricFamily, "penstock_host_pages",
        "Pages of the host tier: free, cached, or held for preempted sequences.", "state",
        lambda s: _host(s, free="num_free_pages", cached="num_cached_pages", held="num_held_pages"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_host_pages_evicted_or_found",
        "Cached pages that the device gave up to the host (demoted), or for good (lost), and took back (promoted).",
        "what",
        lambda s: _host(s, demoted="num_demoted_pages", lost="num_lost_pages", promoted="num_promoted_pages"),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_host_swaps",
        "Preempted sequences that were swapped to the host, and back.", "direction",
        lambda s: _host(s, **{"out": "num_swapped_out", "in": "num_swapped_in"}),
    ),
    EngineMetric(
        CounterMetricFamily, "penstock_host_copied_bytes",
        "Bytes copied between the device's and the host's pages.", "direction",
        lambda s: _host(s, to_host="num_bytes_to_host", from_host="num_bytes_from_host"),
    ),
)  # fmt: skip
