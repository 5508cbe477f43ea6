"""Routes about the server itself, for operators, probes and clients: models, health, metrics, resetting the cache."""

import msgspec

from penstock.frontend import schema
from penstock.frontend.api.service import Service
from penstock.frontend.errors import ModelNotFound, Overloaded, ShuttingDown, Unavailable
from penstock.frontend.exchange import metrics
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.ipc.version import NAME, VERSION

_SILENT_TIMEOUTS = 3
"""Heartbeat timeouts: one until a scheduler counts as silent, and another one for its restart."""


async def list_models(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v1/models"""
    cards = [_card(service, name) for name in service.model.names]
    return Reply(msgspec.json.encode(schema.ModelList(cards)))


async def show_model(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v1/models/{id}; ids may contain slashes.

    Raises:
        ModelNotFound: if there is none of that name.
    """
    model_id = record.argument
    if model_id not in service.model.names:
        raise ModelNotFound(f"the model {model_id[:256]!r} does not exist", param="model")
    return Reply(msgspec.json.encode(_card(service, model_id)))


def _card(service: Service, name: str) -> schema.ModelCard:
    facts = service.engine.last_facts
    return schema.ModelCard(
        id=name,
        created=service.created,
        root=service.model.names[0],
        max_model_len=service.max_model_len,
        kernels=None if facts is None else facts.kernels,
    )


async def health(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /health: this process answers, and makes progress with its work. If it does not, it should be restarted.

    Raises:
        Unavailable: if there is work, and an engine that says it is ready has not computed a step for too long, or has
            gone silent and does not come back.
    """
    seconds, limit = service.engine.stuck_seconds, service.config.frontend.health_timeout
    if seconds > limit:
        raise Unavailable(f"work is pending, but the engine has computed nothing for {seconds:.0f} s")
    seconds, limit = service.engine.silent_seconds, _SILENT_TIMEOUTS * service.config.ipc.heartbeat_timeout
    if seconds > limit:
        raise Unavailable(f"work is pending, but the engine has been silent for {seconds:.0f} s")
    return Reply(b'{"status":"ok"}')


async def ready(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /ready: whether requests would be served now.

    Raises:
        ShuttingDown, Unavailable: if they would not.
    """
    if service.generations.is_draining:
        raise ShuttingDown("the server is shutting down")
    if service.engine.facts is None:
        raise Unavailable(f"no engine is ready: {service.engine.not_ready_reason}")
    try:
        service.engine.queue.check()
    except Overloaded as error:
        raise Unavailable(error.message, retry_after=error.retry_after) from None
    return Reply(b'{"status":"ready"}')


async def show_metrics(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /metrics in Prometheus' text format."""
    return Reply(service.metrics.exposition(), content_type=metrics.CONTENT_TYPE)


async def reset_prefix_cache(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /reset_prefix_cache: drop all cached prompts that no request uses now.

    Raises:
        Unavailable: if no engine is there.
    """
    service.engine.reset_prefix_cache()
    return Reply(b'{"status":"ok"}')


async def index(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /: a list of routes."""
    routes = {
        "POST /v1/chat/completions": "answer a conversation",
        "POST /v1/completions": "continue texts",
        "POST /v1/responses": "answer, and remember",
        "GET /v1/models": "what is served",
        "GET /openapi.json": "all routes and fields",
        "GET /health": "whether this process answers",
        "GET /ready": "whether requests would be served now",
    }
    return Reply(msgspec.json.encode({"name": NAME, "routes": routes}))


async def version(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /version"""
    return Reply(msgspec.json.encode({"version": VERSION}))
