"""Routes about the server itself, for operators, probes and clients: models, health, metrics, resetting the cache."""

import re
from dataclasses import asdict

import msgspec
from msgspec import UNSET, UnsetType

from penstock.config.slow_kernels import slow_kernels
from penstock.frontend import schema
from penstock.frontend.api.service import Service
from penstock.frontend.errors import (
    InvalidParameter,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RouteNotFound,
    ShuttingDown,
    Unavailable,
)
from penstock.frontend.exchange import metrics
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.ipc.messages import ListRequests, RequestState, SequenceStatus
from penstock.ipc.version import NAME, VERSION

_MAX_PROFILED_STEPS = 1000
"""A trace grows by a megabyte every few steps, and is in the worker's memory until it is written."""
_MAX_LISTED = 1000
_LIST_SECONDS = 5.0
_STATES: dict[str, RequestState] = {"": "", "running": "running", "waiting": "waiting", "paused": "paused"}

STUCK_SECONDS = 900.0
"""Time without a finished step, while there is work, after which /health answers 503: longer than the longest step."""

_SILENT_TIMEOUTS = 3
"""Heartbeat timeouts that /health waits: one until a scheduler counts as silent, the others for its restart."""


async def list_models(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v1/models"""
    cards = [_card(service.view(name), name) for name in service.names]
    return Reply(msgspec.json.encode(schema.ModelList(cards)))


async def show_model(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v1/models/{id}; ids may contain slashes.

    Raises:
        ModelNotFound: if there is no model of that name.
    """
    name = asked_model(service, record)
    return Reply(msgspec.json.encode(_card(service.view(name), name)))


def asked_model(service: Service, record: RequestRecord) -> str:
    """The model that a path names.

    Raises:
        ModelNotFound: if there is no model of that name.
    """
    if record.argument not in service.names:
        raise ModelNotFound(f"the model {record.argument[:256]!r} does not exist", param="model")
    return record.argument


def _card(service: Service, name: str) -> schema.ModelCard:
    facts, variant = service.engine.last_facts, service.variant
    return schema.ModelCard(
        id=name,
        created=service.created,
        root=service.model.names[0] if variant is None else variant.root,
        parent=None if variant is None else variant.parent,
        max_model_len=service.max_model_len,
        kernels=None if facts is None else facts.kernels,
        system_fingerprint=service.fingerprint,
        input_modalities=("text",) if service.image_limits is None else ("text", "image"),
        sampling_defaults=asdict(service.model.defaults),
        warning=None if facts is None else slow_kernels(facts.device, facts.kernels) or None,
    )


async def health(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /health: whether this process answers and makes progress with its work. If not, it should be restarted.

    Raises:
        Unavailable: if there is work, and no engine that reports it is ready has computed a step for too long; or if an
            engine has gone silent and does not come back, and no other one takes requests.
    """
    seconds, limit = service.engine.stuck_seconds, STUCK_SECONDS
    if seconds > limit:
        raise Unavailable(f"work is pending, but the engine has computed nothing for {seconds:.0f} s")
    seconds, limit = service.engine.silent_seconds, _SILENT_TIMEOUTS * service.config.ipc.heartbeat_timeout
    if seconds > limit:
        raise Unavailable(f"work is pending, but the engine has been silent for {seconds:.0f} s")
    book = service.engine
    if len(book.links) == 1:
        return Reply(b'{"status":"ok"}')
    return Reply(
        msgspec.json.encode({"status": "ok", "engines": {book.label(link): link.state for link in book.links}})
    )


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
        Unavailable: if there is no engine.
    """
    service.engine.reset_prefix_cache()
    return Reply(b'{"status":"ok"}')


async def start_profile(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /start_profile: the workers record their next steps in trace files.

    Raises:
        InvalidRequest: if the server was started without a folder for traces.
        InvalidParameter: if the number of steps is out of bounds.
        Unavailable: if there is no engine.
    """
    num_steps = record.query.get("num_steps", "60")
    if not re.fullmatch("[0-9]{1,4}", num_steps) or not 1 <= int(num_steps) <= _MAX_PROFILED_STEPS:
        raise InvalidParameter(f"num_steps must be a number from 1 to {_MAX_PROFILED_STEPS}", param="num_steps")
    return _profile(service, int(num_steps))


async def stop_profile(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /stop_profile: write what has been recorded. Raises `InvalidRequest` and `Unavailable` as above."""
    return _profile(service, 0)


def _profile(service: Service, num_steps: int) -> Reply:
    if not service.config.worker.profile:
        raise InvalidRequest(
            "this frontend knows of no folder for traces: start the server with --profile FOLDER, or set "
            "PENSTOCK_PROFILE for frontends and workers"
        )
    service.engine.profile_steps(num_steps)
    return Reply(b'{"status":"ok"}')


async def list_requests(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /debug/requests: what all live sequences are doing, and why some of them wait.

    Raises:
        InvalidParameter: if the query is not understood.
        Unavailable: if no engine answers.
    """
    limit, state = record.query.get("limit", "100"), _STATES.get(record.query.get("state", ""))
    if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= _MAX_LISTED:
        raise InvalidParameter(f"limit must be a number from 1 to {_MAX_LISTED}", param="limit")
    if state is None:
        raise InvalidParameter("state must be running, waiting or paused", param="state")
    question = ListRequests(0, int(limit), state, record.query.get("id", "")[:200])
    answers = await service.engine.list_requests(question, _LIST_SECONDS)
    if not answers:
        raise Unavailable("no engine answers")
    found = [
        _status(each, label if len(answers) > 1 else UNSET)
        for label, answer in answers.items()
        for each in answer.sequences
    ]
    listed = schema.RequestStatusList(
        found[: int(limit)],
        len(found) > int(limit) or any(answer.has_more for answer in answers.values()),
        sum(answer.num_running for answer in answers.values()),
        sum(answer.num_waiting for answer in answers.values()),
        sum(answer.num_paused for answer in answers.values()),
    )
    return Reply(msgspec.json.encode(listed))


async def expert_load(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /debug/expert_load: the tokens that each expert has computed, in the format that --expert-load reads.

    Raises:
        RouteNotFound: if no engine has reported any.
    """
    layers: dict[str, list[int]] = {}
    for load in service.engine.expert_loads:
        for layer in load.layers:
            counts = layers.setdefault(str(layer.layer), [0] * len(layer.tokens))
            layers[str(layer.layer)] = [a + b for a, b in zip(counts, layer.tokens, strict=True)]
    if not layers:
        raise RouteNotFound("expert load is only recorded with --enable-expert-parallel")
    return Reply(msgspec.json.encode(schema.ExpertLoad(layers)))


def _status(told: SequenceStatus, engine: str | UnsetType) -> schema.RequestStatus:
    return schema.RequestStatus(
        id=told.request_id.rpartition(":")[2].partition("#")[0],
        index=told.sequence_idx,
        state=told.state,
        reason=told.reason or None,
        tenant=told.tenant,
        age_seconds=round(told.age, 3) if told.age >= 0 else None,
        prompt_tokens=told.num_prompt_tokens,
        output_tokens=told.num_output_tokens,
        max_output_tokens=told.max_output_tokens,
        computed_tokens=told.num_computed_tokens,
        cached_tokens=told.num_cached_tokens,
        pages=told.num_pages,
        row=told.row if told.row >= 0 else None,
        preemptions=told.num_preemptions,
        engine=engine,
    )


async def index(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /: a list of routes."""
    routes = {
        "POST /v1/chat/completions": "answer a conversation",
        "POST /v1/completions": "continue texts",
        "GET /v1/models": "what is served",
        "GET /openapi.json": "all routes and fields",
        "GET /health": "whether this process answers",
        "GET /ready": "whether requests would be served now",
    }
    return Reply(msgspec.json.encode({"name": NAME, "routes": routes}))


async def version(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /version"""
    system = service.system
    return Reply(msgspec.json.encode(schema.Version(VERSION, *(() if system is None else system))))
