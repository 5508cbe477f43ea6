"""Traces over OTLP: what a collector gets of requests, and that nothing is imported without one."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.config import Config, ConfigError, FrontendOptions
from penstock.config.options import validate
from penstock.frontend.exchange.exchange import Exchange, Request
from penstock.frontend.exchange.replies import Reply
from penstock.frontend.http.routes import ROUTES
from tests.frontend.fake_scheduler import Script
from tests.frontend.http_client import HELLO, chat, complete, get, post
from tests.frontend.live_server import LiveServer, live_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector:
    """Takes traces over HTTP, as OpenTelemetry's does."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Any]:
        """All of them, the children before the requests that they belong to."""
        return [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for scoped in of_resource.scope_spans
            for span in scoped.spans
        ]

    def service(self) -> dict[str, Any]:
        return attributes(self.requests[0].resource_spans[0].resource)


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


@contextmanager
def traced(checkpoint: Path, sockets: Path) -> Iterator[tuple[LiveServer, Collector]]:
    """A server, and a collector that has got all its spans once the server is closed."""
    with collecting() as collector:
        options = {"otlp_traces_endpoint": collector.url}
        with live_server(checkpoint, sockets, frontend=options) as live:
            yield live, collector


def test_a_request_and_its_phases(checkpoint: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with traced(checkpoint, sockets) as (live, collector):
        live.says("Water runs down", num_cached_tokens=1, delay=0.002)
        answer = post(
            live,
            "/v1/chat/completions",
            {"messages": HELLO, "max_tokens": 64, "temperature": 0.5, "n": 2},
            traceparent=f"00-{TRACE}-{PARENT}-01",
        )
        usage = answer.json()["usage"]
        live.close()
    assert collector.service()["service.name"] == "penstock"
    assert collector.service()["deployment.environment"] == "test"
    [request] = [span for span in collector.spans if span.name == "chat test/model"]
    children = [span for span in collector.spans if span.parent_span_id == request.span_id]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert {span.trace_id.hex() for span in children} == {TRACE}
    assert [span.name for span in children] == ["queue", "prefill", "decode"]
    times = [request.start_time_unix_nano]
    for span in children:
        times += [span.start_time_unix_nano, span.end_time_unix_nano]
    times.append(request.end_time_unix_nano)
    assert times == sorted(times)
    facts = attributes(request)
    assert request.kind == request.SPAN_KIND_SERVER
    assert facts["gen_ai.operation.name"] == "chat"
    assert facts["gen_ai.request.model"] == "test/model"
    assert (facts["gen_ai.request.max_tokens"], facts["gen_ai.request.choice.count"]) == (64, 2)
    assert facts["gen_ai.request.temperature"] == 0.5
    assert facts["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert facts["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert facts["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert facts["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert (facts["http.route"], facts["http.response.status_code"]) == ("/v1/chat/completions", 200)
    assert facts["gen_ai.request.id"] == answer.headers["x-request-id"]
    assert 0 <= facts["gen_ai.latency.time_to_first_token"] <= facts["gen_ai.latency.e2e"]
    assert attributes(children[1])["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes(children[2])["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert request.status.code == 0


def test_requests_that_fail_or_do_not_generate(checkpoint: Path, sockets: Path) -> None:
    with traced(checkpoint, sockets) as (live, collector):
        get(live, "/health")
        get(live, "/metrics")
        post(live, "/tokenize", {"prompt": "Hello"})
        complete(live, n=0)
        live.plays(lambda request, index: Script([5, 6], error="no more", delay=0.002))
        chat(live)
        chat(live, stream=True)
        live.says("Hi")
        complete(live)
        post(live, "/v1/messages", {"max_tokens": 9, "messages": HELLO}, traceparent="nonsense")
        live.close()
    roots = [span for span in collector.spans if not span.parent_span_id]
    told = [(span.name, span.status.code, attributes(span).get("error.type")) for span in roots]
    assert told == [
        ("POST /tokenize", 0, None),
        ("POST /v1/completions", 0, "invalid_value"),
        ("chat test/model", 2, "engine_error"),
        ("chat test/model", 2, "engine_error"),
        ("text_completion test/model", 0, None),
        ("chat test/model", 0, None),
    ]
    assert "no more" in roots[2].status.message
    assert len({span.trace_id for span in roots}) == len(roots)


def test_requests_of_batches_are_marked(checkpoint: Path, sockets: Path) -> None:
    [route] = [route for route in ROUTES if route.path == "/v1/completions"]

    async def body() -> bytes:
        return b'{"prompt": "Hello"}'

    with traced(checkpoint, sockets) as (live, collector):
        service = live.server.service

        async def send() -> None:
            exchange = Exchange(service, service.access, service.metrics, 0.0)
            request = Request({"x-request-id": ["batch_1a2b-7"]}, body, key_id="", remote="batches")
            async with exchange.answer(route, request) as reply:
                assert isinstance(reply, Reply)
                assert reply.status == 200

        asyncio.run_coroutine_threadsafe(send(), live.loop).result(60)
        live.close()
    [request] = [span for span in collector.spans if not span.parent_span_id]
    facts = attributes(request)
    assert (facts["penstock.background"], facts["penstock.batch.id"]) == (True, "batch_1a2b")


def test_a_parent_that_is_not_sampled_is_honoured(checkpoint: Path, sockets: Path) -> None:
    with traced(checkpoint, sockets) as (live, collector):
        post(live, "/v1/completions", {"prompt": "Hello"}, traceparent=f"00-{TRACE}-{PARENT}-00")
        complete(live)
        live.close()
    assert TRACE not in {span.trace_id.hex() for span in collector.spans}
    assert collector.spans


def test_a_collector_that_is_not_there_harms_nobody(checkpoint: Path, sockets: Path) -> None:
    options = {"otlp_traces_endpoint": "http://127.0.0.1:9"}
    with live_server(checkpoint, sockets, frontend=options) as live:
        assert chat(live).status == 200


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://"])
def test_other_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTLP over HTTP"):
        validate(Config(frontend=FrontendOptions(otlp_traces_endpoint=endpoint)))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.config.observing.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-llm\[otel\]'"):
        validate(Config(frontend=FrontendOptions(otlp_traces_endpoint="http://127.0.0.1:4318")))


def test_nothing_is_imported_without_an_endpoint() -> None:
    program = (
        "import sys; import penstock.frontend.http.server; from penstock.config.options import FrontendOptions;"
        "from penstock.frontend.http.observers import observing; assert not observing(FrontendOptions());"
        "print([name for name in sys.modules if 'opentelemetry' in name or 'access_log' in name])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_an_observer_that_fails_harms_nobody(checkpoint: Path, sockets: Path) -> None:
    def fails(*facts: object) -> None:
        raise ValueError("on purpose")

    with live_server(checkpoint, sockets) as live:
        service = live.server.service
        [route] = [route for route in ROUTES if route.path == "/health"]

        async def send() -> int:
            service.observers = (fails,)
            async with Exchange(service, service.access, service.metrics, 0.0).answer(route, Request({})) as reply:
                assert isinstance(reply, Reply)
                return reply.status

        assert asyncio.run_coroutine_threadsafe(send(), live.loop).result(60) == 200
