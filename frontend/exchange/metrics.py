"""Prometheus metrics, named in vLLM's style.

What requests produce is counted here; what the engine reports (queue, rows, pages) is read from
its latest `EngineStats` at each scrape. Several frontends on one port share their counts (`metrics_board.py`),
so that any of them answers for all.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as PrometheusSample
from prometheus_client.utils import floatToGoString

from penstock.frontend.exchange.metrics_board import MetricsBoard, Sample, Snapshot
from penstock.frontend.exchange.replies import RequestRecord
from penstock.ipc.logs import num_dropped_log_lines
from penstock.ipc.messages import EngineStats

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_E2E_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0)
_PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 480.0)
_TOKEN_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class Histogram:
    """A histogram cheap enough to use per token: prometheus_client's own costs five times as much."""

    def __init__(self, name: str, about: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._about = about
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def note(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        """All values so far, in the text format's terms."""
        names = [*(floatToGoString(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._about, buckets=buckets, sum_value=self._sum)


class Metrics:
    """All metrics of one frontend process."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]], board: MetricsBoard | None = None) -> None:
        """`engines` returns the latest statistics of each engine, by its label; `board` is shared with siblings."""
        self._engine_collector = EngineCollector(engines)
        self._board = board
        registry = CollectorRegistry()  # what this process counts
        self._registry = registry
        self._histograms: list[Histogram] = []
        self.requests = Counter(
            "penstock_requests", "HTTP requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.closed_connections = Counter(
            "penstock_http_connections_closed",
            "Connections closed because they exceeded a limit, by limit.",
            ["reason"],
            registry=registry,
        )
        self.dropped_messages = Counter(
            "penstock_dropped_messages", "Messages from the scheduler that could not be read.", registry=registry
        )
        self.dropped_log_lines = Counter(
            "penstock_frontend_log_lines_dropped",
            "Log lines of the frontends that could not be written, or that nobody read.",
            registry=registry,
        )
        self._num_dropped_log_lines = 0
        self.sequences = Counter(
            "penstock_request_success", "Finished sequences by finish reason.", ["finished_reason"], registry=registry
        )
        self.prompt_tokens = Counter("penstock_prompt_tokens", "Prompt tokens of all requests.", registry=registry)
        self.generation_tokens = Counter("penstock_generation_tokens", "Tokens generated.", registry=registry)
        self.cached_tokens = Counter(
            "penstock_prompt_tokens_cached", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self.live_requests = Gauge("penstock_num_requests_in_frontend", "HTTP requests in progress.", registry=registry)
        self.time_to_first_token = self._histogram(
            "penstock_time_to_first_token_seconds", "Time from arrival to first token.", _TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "penstock_inter_token_latency_seconds", "Time between two tokens of a sequence.", _ITL_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "penstock_e2e_request_latency_seconds", "Time from arrival to the end of the answer.", _E2E_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "penstock_request_time_per_output_token_seconds",
            "Decode time of a request per token of a sequence, the first one left out.",
            _ITL_BUCKETS,
        )
        self.queue_time = self._histogram(
            "penstock_request_queue_time_seconds", "Time from the engine's queue to the first row.", _PHASE_BUCKETS
        )
        self.prefill_time = self._histogram(
            "penstock_request_prefill_time_seconds", "Time from the first row to the first token.", _PHASE_BUCKETS
        )
        self.decode_time = self._histogram(
            "penstock_request_decode_time_seconds", "Time from the first token to the last.", _PHASE_BUCKETS
        )
        self.request_prompt_tokens = self._histogram(
            "penstock_request_prompt_tokens", "Prompt tokens per request.", _TOKEN_BUCKETS
        )
        self.request_generation_tokens = self._histogram(
            "penstock_request_generation_tokens", "Generated tokens per request.", _TOKEN_BUCKETS
        )

    def _histogram(self, name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(name, about, bounds)
        self._histograms.append(made)
        return made

    def note(self, record: RequestRecord, now: float) -> None:
        """Count a request that has been answered (or whose client has left)."""
        self.requests.labels(record.endpoint, str(record.status)).inc()
        if not record.finish_reasons:
            return
        for reason in record.finish_reasons:
            self.sequences.labels(reason).inc()
        self.prompt_tokens.inc(record.num_prompt_tokens)
        self.generation_tokens.inc(record.num_output_tokens)
        self.cached_tokens.inc(record.num_cached_tokens)
        self.request_prompt_tokens.note(record.num_prompt_tokens)
        self.request_generation_tokens.note(record.num_output_tokens)
        self.e2e_latency.note(now - record.arrived)
        if record.first_token_at is not None:
            self.time_to_first_token.note(record.first_token_at - record.arrived)
            self._note_phases(record, record.first_token_at)

    def _note_phases(self, record: RequestRecord, first_token_at: float) -> None:
        decode_seconds = record.last_token_at - first_token_at
        self.queue_time.note(record.queue_seconds)
        self.prefill_time.note(max(first_token_at - record.submitted_at - record.queue_seconds, 0.0))
        self.decode_time.note(decode_seconds)
        num_later_tokens = record.num_output_tokens / max(len(record.finish_reasons), 1) - 1
        if num_later_tokens > 0:
            self.time_per_output_token.note(decode_seconds / num_later_tokens)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format: those of all frontends that share a board."""
        self._bring_up_to_date()
        shown = CollectorRegistry(auto_describe=False)
        shown.register(self._engine_collector)
        if self._board is None:
            shown.register(_Families(self._families()))
        else:
            # Published first: the frontend asked next must not report less than this one does now.
            families = self._publish(self._board)
            add(families, self._board.others())
            shown.register(_Families(families))
        return prometheus_client.generate_latest(shown)

    def share(self) -> None:
        """Let the other frontends read what has been counted so far."""
        if self._board is not None:
            self._bring_up_to_date()
            self._publish(self._board)

    def _publish(self, board: MetricsBoard) -> list[Metric]:
        families = self._families()
        add([family for family in families if family.type != "gauge"], [board.inherited])
        board.publish({family.name: [Sample(*sample[:3]) for sample in family.samples] for family in families})
        return families

    def _families(self) -> list[Metric]:
        return _without_times(self._registry.collect()) + [histogram.family() for histogram in self._histograms]

    def _bring_up_to_date(self) -> None:
        num_lost = num_dropped_log_lines()
        self.dropped_log_lines.inc(num_lost - self._num_dropped_log_lines)
        self._num_dropped_log_lines = num_lost


class _Families(Collector):
    """Metrics that exist already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _without_times(families: Iterable[Metric]) -> list[Metric]:
    """Remove the creation times of counters, which mean nothing for counters of several processes."""
    found = list(families)
    for family in found:
        family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return found


def add(families: list[Metric], snapshots: list[Snapshot]) -> None:
    """Add the counts of other frontends to `families`."""
    for family in families:
        sums = {(sample.name, *sample.labels.items()): sample for sample in family.samples}
        for snapshot in snapshots:
            for name, labels, value in snapshot.get(family.name, ()):
                key = (name, *labels.items())
                found = sums.get(key)
                if found is None:
                    sums[key] = PrometheusSample(name, labels, value)
                else:
                    sums[key] = found._replace(value=found.value + value)
        family.samples = list(sums.values())


class EngineCollector(Collector):
    """The engines' counters, as of their latest `EngineStats`. With several engines, each has its own label."""

    def __init__(self, engines: Callable[[], Mapping[str, EngineStats]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        engines = self._engines()
        found: dict[str, Metric] = {}
        for label, stats in engines.items():
            for family in self._families(stats):
                if len(engines) > 1:
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
        for kind, name, about, label, values in _LABELLED:
            family = kind(name, about, labels=[label])
            for key, number in values(stats).items():
                family.add_metric([key], number)
            yield family


_Value = Callable[[EngineStats], float]

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
    "penstock_engine_ready": ("1 while a worker is serving.", lambda s: int(s.is_ready)),
}

_COUNTERS: dict[str, tuple[str, _Value]] = {
    "penstock_engine_steps": ("Forward passes.", lambda s: s.num_steps),
    "penstock_invalid_logits": (
        "Sequences that ended because no token could be sampled from the model's logits.",
        lambda s: s.num_invalid_logits,
    ),
    "penstock_num_preemptions": (
        "Preemptions: sequences that lost their pages and were recomputed.",
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

_LABELLED: tuple[
    tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, str, Callable[[EngineStats], Mapping[str, int]]], ...
] = (
    (
        GaugeMetricFamily, "penstock_num_requests_waiting_by_reason",
        "Sequences that wait for a row, by reason.", "reason", lambda s: s.waiting_reasons or {},
    ),
    (
        CounterMetricFamily, "penstock_engine_dropped_messages",
        "Messages that the engine could not read or did not expect from their sender, by socket.", "socket",
        lambda s: {
            "frontends": s.num_dropped_from_frontends, "workers": s.num_dropped_from_workers,
            "worker": s.num_dropped_by_worker,
        },
    ),
    (
        CounterMetricFamily, "penstock_engine_log_lines_dropped",
        "Log lines that could not be written or that nobody read, by engine process.", "process",
        lambda s: {"scheduler": s.num_log_lines_dropped, "worker": s.num_log_lines_dropped_by_worker},
    ),
)  # fmt: skip
