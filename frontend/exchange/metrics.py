"""Prometheus metrics, named in vLLM's style.

What requests produce is counted here; what the engine reports is read at each scrape (`engine_metrics.py`). On request
all metrics are also exported under vLLM's own names (`vllm_names.py`). Several frontends on one port share their
counts (`metrics_board.py`), so that any of them can answer for all.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample as PrometheusSample
from prometheus_client.utils import floatToGoString

from penstock.frontend.exchange.engine_metrics import EngineCollector
from penstock.frontend.exchange.metrics_board import MetricsBoard, Sample, Snapshot
from penstock.frontend.exchange.replies import Billed, RequestRecord
from penstock.frontend.exchange.vllm_names import vllm_families
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

MAX_KEYS, OTHER_KEYS = 1000, "(others)"
"""API keys with totals of their own; all further keys share one. (A file of keys may be replaced many times.)"""

_KEY_TOTALS = {
    "device_seconds": "Parts of the steps' times that requests of an API key took.",
    "kv_byte_seconds": "Bytes of KV pages that requests of an API key held, over the time for which they held them.",
    "queue_seconds": "Times that requests of an API key waited for their first row.",
    "saved_tokens": "Prompt tokens of an API key that were not computed: prefix cache, or a sibling's prompt.",
    "price": "Price of the device seconds of an API key, with --price-per-hour.",
}


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
        """All values so far, as a metric of the text format."""
        names = [*(floatToGoString(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._about, buckets=buckets, sum_value=self._sum)


class Metrics:
    """All metrics of one frontend process."""

    def __init__(
        self,
        engines: Callable[[], Mapping[str, EngineStats]],
        board: MetricsBoard | None = None,
        price_per_hour: float = 0.0,
        vllm_model: str = "",
    ) -> None:
        """`engines` returns each engine's latest statistics by its label; `board` is shared with the other frontends.

        `price_per_hour`: of one engine's devices; 0: no prices are exported. `vllm_model`: the model's name, if
        metrics are exported under vLLM's names too.
        """
        self._engine_collector = EngineCollector(engines)
        self._board = board
        self._vllm_model = vllm_model
        self.max_adapters = 0
        """Adapters that a worker can have in its memory; a part sets it."""
        registry = CollectorRegistry()
        self.registry = registry
        """The metrics that this process counts itself."""
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
        self.price_per_hour = price_per_hour
        self._keys: set[str] = set()
        self.key_totals = {
            name: Counter(f"penstock_key_{name}", about, ["key"], registry=registry)
            for name, about in _KEY_TOTALS.items()
            if name != "price" or price_per_hour
        }
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
        self.inference_time = self._histogram(
            "penstock_request_inference_time_seconds", "Time from the first row to the last token.", _PHASE_BUCKETS
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

    def note_bill(self, key_id: str, bill: Billed) -> None:
        """Count what the engine spent on a request, by its API key (empty: there are no keys)."""
        if key_id not in self._keys:
            if len(self._keys) >= MAX_KEYS:
                key_id = OTHER_KEYS
            self._keys.add(key_id)
        totals = {
            "device_seconds": bill.device_seconds,
            "kv_byte_seconds": bill.kv_byte_seconds,
            "queue_seconds": bill.queue_seconds or 0.0,
            "saved_tokens": bill.num_saved_tokens,
            "price": bill.price(self.price_per_hour),
        }
        for name, counter in self.key_totals.items():
            counter.labels(key_id).inc(totals[name])

    def _note_phases(self, record: RequestRecord, first_token_at: float) -> None:
        decode_seconds = record.last_token_at - first_token_at
        prefill_seconds = max(first_token_at - record.submitted_at - record.queue_seconds, 0.0)
        self.queue_time.note(record.queue_seconds)
        self.prefill_time.note(prefill_seconds)
        self.inference_time.note(prefill_seconds + decode_seconds)
        self.decode_time.note(decode_seconds)
        num_later_tokens = record.num_output_tokens / max(len(record.finish_reasons), 1) - 1
        if num_later_tokens > 0:
            self.time_per_output_token.note(decode_seconds / num_later_tokens)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format: those of all frontends that share a board."""
        self._bring_up_to_date()
        families = list(self._engine_collector.collect())
        if self._board is None:
            families += self._families()
        else:
            # Publish first: the frontend that is scraped next must not report less than this one does now.
            counted = self._publish(self._board)
            add(counted, self._board.others())
            families += counted
        if self._vllm_model:
            families += vllm_families(families, self._vllm_model, self.max_adapters)
        shown = CollectorRegistry(auto_describe=False)
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
        return _without_times(self.registry.collect()) + [histogram.family() for histogram in self._histograms]

    def _bring_up_to_date(self) -> None:
        num_lost = num_dropped_log_lines()
        self.dropped_log_lines.inc(num_lost - self._num_dropped_log_lines)
        self._num_dropped_log_lines = num_lost


class _Families(Collector):
    """A collector of finished metrics."""

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
