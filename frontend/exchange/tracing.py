"""OpenTelemetry traces of requests, sent when a request has ended, from the times in its record.

    chat penstock-demo            the request, under the span that its `traceparent` names
      queue                       from its submission to the first row
      prefill                     from there to the first token
      decode                      from there to the last token

Nothing is done for traces while a request runs. A thread of OpenTelemetry's SDK sends them in batches; spans that a
collector does not accept are dropped. The SDK reads its own environment variables for sampling (`OTEL_TRACES_SAMPLER`),
headers (`OTEL_EXPORTER_OTLP_HEADERS`) and the service's name (`OTEL_SERVICE_NAME`).
Attributes are those of the semantic conventions for generative AI, and vLLM's for latencies.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from penstock.frontend.exchange.exchange import CLIENT_LEFT, Request, Route
from penstock.frontend.exchange.replies import RequestRecord
from penstock.ipc.version import NAME, VERSION

log = structlog.get_logger()

DEFAULT_PATH = "/v1/traces"
FLUSH_SECONDS = 3.0
"""How long a process that shuts down tries to send its last spans."""

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""The operation of routes that generate; all others are chats."""

_BATCH = "batch_"
"""The prefix of a batch's id. The ids of its requests begin with the batch's id."""


class Traces:
    """Makes spans of requests, and sends them to one collector."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the collector's URL; without a path, OTLP's usual one."""
        _bring_to_our_log(logging.getLogger("opentelemetry"))
        if not urlsplit(endpoint).path.strip("/"):
            endpoint = endpoint.rstrip("/") + DEFAULT_PATH
        service = Resource.create({SERVICE_NAME: NAME, SERVICE_VERSION: VERSION})
        service = service.merge(OTELResourceDetector().detect())  # the environment has the last word
        self._provider = TracerProvider(resource=service, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer(NAME, VERSION)
        self._parents = TraceContextTextMapPropagator()

    def note(self, record: RequestRecord, route: Route, request: Request, now: float) -> None:
        """Make the spans of a request that has ended at this time (`time.monotonic`)."""
        if route.is_quiet:
            return
        since = time.time_ns() - int(now * 1e9)  # from the monotonic clock to the wall clock

        def at(seconds: float) -> int:
            return since + int(seconds * 1e9)

        operation = _OPERATIONS.get(route.path, "chat") if record.asked is not None else ""
        carrier = {name: request.headers[name][0] for name in ("traceparent", "tracestate") if name in request.headers}
        span = self._tracer.start_span(
            f"{operation} {record.asked.model}" if record.asked is not None else f"{route.method} {route.path}".strip(),
            context=self._parents.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=at(record.arrived),
            attributes=_of_request(record, route, request, operation, now),
        )
        if record.first_token_at is not None and span.is_recording():
            self._note_phases(record, span, at, record.first_token_at)
        if record.error is not None and (record.error.status >= 500 or record.status >= 500):
            span.set_status(Status(StatusCode.ERROR, record.error.message))
        elif record.status == CLIENT_LEFT:
            span.set_status(Status(StatusCode.ERROR, "the client left before its answer"))
        span.end(at(now))

    def _note_phases(
        self, record: RequestRecord, span: Span, at: Callable[[float], int], first_token_at: float
    ) -> None:
        first_row_at = min(record.submitted_at + record.queue_seconds, first_token_at)
        phases: list[tuple[str, float, float, dict[str, AttributeValue]]] = [
            ("queue", record.submitted_at, first_row_at, {}),
            ("prefill", first_row_at, first_token_at, _prompt_tokens(record)),
            ("decode", first_token_at, max(record.last_token_at, first_token_at), _output_tokens(record)),
        ]
        context = set_span_in_context(span)
        for name, start, end, attributes in phases:
            child = self._tracer.start_span(name, context=context, start_time=at(start), attributes=attributes)
            child.end(at(end))

    def reopen(self) -> None:
        """Do nothing: there is no file."""

    async def close(self) -> None:
        """Send what is left, for at most FLUSH_SECONDS."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: nothing waits any more
                loop.call_soon_threadsafe(done.set)

        # Not an executor's thread: the process would wait for it at exit, however long the collector is silent.
        threading.Thread(target=work, name="traces", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), FLUSH_SECONDS)
        except TimeoutError:
            log.warning("last traces not sent", seconds=FLUSH_SECONDS)


def _of_request(
    record: RequestRecord, route: Route, request: Request, operation: str, now: float
) -> dict[str, AttributeValue]:
    """The attributes of a request's span."""
    found: dict[str, AttributeValue] = {
        "http.request.method": route.method or "_OTHER",
        "http.route": route.path,
        "http.response.status_code": record.status,
        "gen_ai.request.id": record.request_id,
        "gen_ai.latency.e2e": now - record.arrived,
    }
    if request.remote:
        found["client.address"] = request.remote
    if record.key_id:
        found["penstock.key"] = record.key_id
    if record.engine:
        found["penstock.engine"] = record.engine
    if record.is_background:
        found["penstock.background"] = True
        batch_id, _, _ = record.request_id.rpartition("-")
        if batch_id.startswith(_BATCH):
            found["penstock.batch.id"] = batch_id
    if record.error is not None:
        found["error.type"] = record.error.code
    elif record.status == CLIENT_LEFT:
        found["error.type"] = "client_left"
    if record.asked is None:
        return found
    asked, sampling = record.asked, record.asked.sampling
    found |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": asked.model,
        "gen_ai.response.model": asked.model,
        "gen_ai.request.stream": asked.stream,
        "gen_ai.request.choice.count": asked.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        **_prompt_tokens(record),
        **_output_tokens(record),
    }
    if asked.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = asked.max_tokens
    if record.first_token_at is not None:
        first = record.first_token_at
        found |= {
            "gen_ai.latency.time_in_queue": record.queue_seconds,
            "gen_ai.latency.time_to_first_token": first - record.arrived,
            "gen_ai.latency.time_in_model_prefill": max(first - record.submitted_at - record.queue_seconds, 0.0),
            "gen_ai.latency.time_in_model_decode": max(record.last_token_at - first, 0.0),
        }
    return found


def _prompt_tokens(record: RequestRecord) -> dict[str, AttributeValue]:
    return {
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
    }


def _output_tokens(record: RequestRecord) -> dict[str, AttributeValue]:
    return {
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.reasoning.output_tokens": record.num_reasoning_tokens,
    }


class _ToOurLog(logging.Handler):
    """Writes the SDK's messages to our log."""

    def emit(self, record: logging.LogRecord) -> None:
        log.warning("trace export failed", reason=record.getMessage())


def _bring_to_our_log(logger: logging.Logger) -> None:
    if not any(isinstance(handler, _ToOurLog) for handler in logger.handlers):
        logger.addHandler(_ToOurLog())
        logger.propagate = False
