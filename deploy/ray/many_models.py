"""One API over several models, each with a service and engines of its own. The request names its model.

POST  by `model` in the body; without it, or if no model has that name, the first model's service answers
GET   a model's own paths by its name; lists and metrics cover all models
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.frontend import schema
from penstock.frontend.api import operations
from penstock.frontend.api.service import Service
from penstock.frontend.exchange import metrics
from penstock.frontend.exchange.exchange import Route
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.http.asgi import AsgiApp, Message, Receive, Send
from penstock.frontend.http.routes import ROUTES

_MODEL_PATHS = ("/v1/models/", "/openai/v1/models/", "/models/", "/v2/models/")


class _Asked(msgspec.Struct):
    model: str | None = None


class ManyModels:
    """The application. The services must outlive it; they share the first one's stored responses."""

    def __init__(self, services: Sequence[Service], host: str = "") -> None:
        """`host` as for `AsgiApp`."""
        first, *others = self._services = list(services)
        for service in others:
            service.share_stored(first)
        routes = [_of_all(route, self._services) for route in ROUTES]
        self._apps = [AsgiApp(service, host, routes) for service in services]
        self._by_name = {
            name: app for service, app in zip(services, self._apps, strict=True) for name in service.model.names
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope with the model that it names."""
        app = self._apps[0]
        if scope["type"] == "http" and scope["method"] == "POST":
            app, receive = await self._read(receive)
        elif scope["type"] == "http":
            app = self._by_path(scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")))
        await app(scope, receive, send)

    def _by_path(self, path: str) -> AsgiApp:
        for prefix in _MODEL_PATHS:
            if path.startswith(prefix):
                name = path.removeprefix(prefix)
                return self._by_name.get(name) or self._by_name.get(name.removesuffix("/ready")) or self._apps[0]
        for service, app in zip(self._services, self._apps, strict=True):  # for probes, all must be ready
            if service.engine.facts is None:
                return app
        return self._apps[0]

    async def _read(self, receive: Receive) -> tuple[AsgiApp, Receive]:
        """The application for the model in the body, and a `receive` that repeats the messages."""
        most = max(service.max_body_bytes for service in self._services)
        came: list[Message] = []
        body = bytearray()  # bytes would be copied as a whole for each message
        while len(body) <= most:
            came.append(message := await receive())
            body += message.get("body", b"")
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                break
        try:
            name = msgspec.json.decode(body, type=_Asked).model
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            name = None  # the handler reports the error
        again = iter(came)

        async def replay() -> Message:
            return next(again, None) or await receive()

        return self._by_name.get(name or "", self._apps[0]), replay


def _of_all(route: Route, services: Sequence[Service]) -> Route:
    """The route; if it lists models, it answers for all of them."""

    async def list_models(service: Service, record: RequestRecord, body: bytes) -> Reply:
        answers = [await operations.list_models(each, record, body) for each in services]
        cards = [card for answer in answers for card in msgspec.json.decode(answer.body, type=schema.ModelList).data]
        return Reply(msgspec.json.encode(schema.ModelList(cards)))

    async def show_metrics(service: Service, record: RequestRecord, body: bytes) -> Reply:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Labelled(services))
        return Reply(prometheus_client.generate_latest(registry), content_type=metrics.CONTENT_TYPE)

    async def list_infos(service: Service, record: RequestRecord, body: bytes) -> Reply:
        from penstock.parts.anthropic.frontend.models import (  # the part is there, as it has this route
            model_infos,
            page,
        )

        return page([info for each in services for info in model_infos(each)], record.query)

    if route.handler is operations.list_models:
        others = tuple((header, replace(other, handler=list_infos)) for header, other in route.for_header)
        return replace(route, handler=list_models, for_header=others)
    return replace(route, handler=show_metrics) if route.handler is operations.show_metrics else route


class _Labelled(Collector):
    """All services' metrics, with the name of their model as a label."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services

    def collect(self) -> list[Metric]:
        found: dict[str, Metric] = {}
        for service in self._services:
            label = {"model_name": service.model.names[0]}
            for family in text_string_to_metric_families(service.metrics.exposition().decode()):
                family.samples = [sample._replace(labels=label | sample.labels) for sample in family.samples]
                known = found.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return list(found.values())
