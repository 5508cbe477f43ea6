"""Prometheus metrics, named in vLLM's style.

What requests bring is counted here; what the engine says of itself (queue, rows, pages) is read from
its latest `EngineStats` when somebody scrapes. With several frontends on one port (PROMETHEUS_MULTIPROC_DIR
set before this module is imported) every process writes to files and any of them answers for all.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from penstock.frontend.replies import RequestRecord
from penstock.ipc.messages import EngineStats

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0)
_TOKEN_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)

_MAX_NOTED = 1000
"""Values that a BatchedHistogram keeps to itself, at most."""


class BatchedHistogram(Histogram):
    """A histogram for what happens per token: `note` costs a fifth of `observe`, and is seen after `flush`."""

    def start_batch(self) -> None:
        """Call once, after construction (which prometheus_client repeats for each set of labels)."""
        self._noted = [0] * len(self._buckets)
        self._noted_sum = 0.0
        self._num_noted = 0

    def note(self, value: float) -> None:
        """Count a value; every thousandth call flushes."""
        self._noted[bisect_left(self._upper_bounds, value)] += 1
        self._noted_sum += value
        self._num_noted += 1
        if self._num_noted >= _MAX_NOTED:
            self.flush()

    def flush(self) -> None:
        """Add what was noted to the metric, as `observe` does."""
        for bucket, count in zip(self._buckets, self._noted, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(self._noted_sum)
        self.start_batch()


class Metrics:
    """All metrics of one frontend process."""

    def __init__(self, engine_stats: Callable[[], EngineStats | None]) -> None:
        """`engine_stats` gives the engine's latest word, None before the first."""
        self._is_multiprocess = MULTIPROCESS_VARIABLE in os.environ
        self._engine_collector = EngineCollector(engine_stats)
        registry = CollectorRegistry()
        self._registry = registry
        registry.register(self._engine_collector)
        self.requests = Counter(
            "penstock_requests", "HTTP requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.closed_connections = Counter(
            "penstock_http_connections_closed",
            "Connections that were closed because they exceeded a bound, by which.",
            ["reason"],
            registry=registry,
        )
        self.dropped_messages = Counter(
            "penstock_dropped_messages", "Messages from the scheduler that are none.", registry=registry
        )
        self.sequences = Counter(
            "penstock_request_success", "Sequences by what ended them.", ["finished_reason"], registry=registry
        )
        self.prompt_tokens = Counter("penstock_prompt_tokens", "Tokens of all prompts.", registry=registry)
        self.generation_tokens = Counter("penstock_generation_tokens", "Tokens generated.", registry=registry)
        self.cached_tokens = Counter(
            "penstock_prompt_tokens_cached", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self.live_requests = Gauge(
            "penstock_num_requests_in_frontend",
            "HTTP requests being answered.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.time_to_first_token = Histogram(
            "penstock_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=_TTFT_BUCKETS,
        )
        self.inter_token_latency = BatchedHistogram(
            "penstock_inter_token_latency_seconds",
            "Between two tokens of a sequence.",
            registry=registry,
            buckets=_ITL_BUCKETS,
        )
        self.inter_token_latency.start_batch()
        self.e2e_latency = Histogram(
            "penstock_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer.",
            registry=registry,
            buckets=_E2E_BUCKETS,
        )
        self.request_prompt_tokens = Histogram(
            "penstock_request_prompt_tokens", "Prompt tokens of a request.", registry=registry, buckets=_TOKEN_BUCKETS
        )
        self.request_generation_tokens = Histogram(
            "penstock_request_generation_tokens",
            "Tokens generated for a request.",
            registry=registry,
            buckets=_TOKEN_BUCKETS,
        )

    def note(self, record: RequestRecord, now: float) -> None:
        """Count a request that has been answered (or whose client has left)."""
        self.requests.labels(record.endpoint, str(record.status)).inc()
        self.inter_token_latency.flush()
        if not record.finish_reasons:
            return
        for reason in record.finish_reasons:
            self.sequences.labels(reason).inc()
        self.prompt_tokens.inc(record.num_prompt_tokens)
        self.generation_tokens.inc(record.num_output_tokens)
        self.cached_tokens.inc(record.num_cached_tokens)
        self.request_prompt_tokens.observe(record.num_prompt_tokens)
        self.request_generation_tokens.observe(record.num_output_tokens)
        self.e2e_latency.observe(now - record.arrived)
        if record.first_token_at is not None:
            self.time_to_first_token.observe(record.first_token_at - record.arrived)

    def exposition(self) -> bytes:
        """All metrics as Prometheus' text."""
        self.inter_token_latency.flush()
        if not self._is_multiprocess:
            return prometheus_client.generate_latest(self._registry)
        everyone = CollectorRegistry()
        MultiProcessCollector(everyone)
        everyone.register(self._engine_collector)  # each frontend hears the same stats: not to be summed
        return prometheus_client.generate_latest(everyone)

    def close(self) -> None:
        """This process ends: its gauges of what is live no longer count."""
        if self._is_multiprocess:
            mark_process_dead(os.getpid())


class EngineCollector(Collector):
    """The engine's counters, as of its latest `EngineStats`."""

    def __init__(self, engine_stats: Callable[[], EngineStats | None]) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._engine_stats()
        if stats is None:
            return
        gauges = {
            "penstock_num_requests_waiting": ("Sequences that wait for a row.", stats.num_waiting),
            "penstock_num_requests_running": ("Sequences that hold a row.", stats.num_running),
            "penstock_num_waiting_tokens": ("Their tokens.", stats.num_waiting_tokens),
            "penstock_num_requests_paused": ("Requests whose clients do not read.", stats.num_paused),
            "penstock_num_rows": ("Rows of the worker, in use or free.", stats.num_rows),
            "penstock_num_pages": ("Pages of the KV pool.", stats.num_pages),
            "penstock_num_free_pages": ("Pages that hold nothing.", stats.num_free_pages),
            "penstock_num_cached_pages": ("Pages owned by the prefix cache alone.", stats.num_cached_pages),
            "penstock_num_used_pages": ("Pages in a running sequence's page table.", stats.num_used_pages),
            "penstock_kv_cache_usage_perc": (
                "Share of the pages that running sequences use (1 is all).",
                stats.num_used_pages / max(stats.num_pages, 1),
            ),
            "penstock_engine_ready": ("1 while a worker serves.", int(stats.is_ready)),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(name, about, value=value)
        counters = {
            "penstock_engine_steps": ("Forward passes.", stats.num_steps),
            "penstock_invalid_logits": (
                "Sequences that ended because no token could be drawn from the model's logits.",
                stats.num_invalid_logits,
            ),
            "penstock_num_preemptions": ("Running sequences whose pages were taken back.", stats.num_preemptions),
            "penstock_engine_prompt_tokens": ("Prompt tokens admitted.", stats.num_prompt_tokens),
            "penstock_prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
            "penstock_engine_generation_tokens": ("Tokens generated.", stats.num_output_tokens),
        }
        for name, (about, value) in counters.items():
            yield CounterMetricFamily(name, about, value=value)
        dropped = CounterMetricFamily(
            "penstock_engine_dropped_messages",
            "Messages that are none, or mean nothing from their sender, by the socket of the engine that they came to.",
            labels=["socket"],
        )
        dropped.add_metric(["frontends"], stats.num_dropped_from_frontends)
        dropped.add_metric(["workers"], stats.num_dropped_from_workers)
        dropped.add_metric(["worker"], stats.num_dropped_by_worker)
        yield dropped
