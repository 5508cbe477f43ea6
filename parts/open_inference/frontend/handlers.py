"""The part of the Open Inference Protocol (v2) that KServe and others use: health, and what the server serves.

Text is generated over the OpenAI API, which KServe calls under `/openai/v1`; there is no v2 inference.
"""

import msgspec

from penstock.frontend.api import operations
from penstock.frontend.api.service import Service
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.ipc.version import NAME, VERSION


class ServerMetadata(msgspec.Struct, frozen=True):
    name: str
    version: str
    extensions: list[str]


class Live(msgspec.Struct, frozen=True):
    live: bool


class Ready(msgspec.Struct, frozen=True):
    ready: bool


class ModelReady(msgspec.Struct, frozen=True):
    name: str
    ready: bool


class TensorMetadata(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct, frozen=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]  # none: there is no v2 inference
    outputs: list[TensorMetadata]


async def server(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v2"""
    return Reply(msgspec.json.encode(ServerMetadata(NAME, VERSION, [])))


async def live(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v2/health/live: as GET /health."""
    await operations.health(service, record, body)
    return Reply(msgspec.json.encode(Live(True)))


async def ready(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v2/health/ready: as GET /ready."""
    await operations.ready(service, record, body)
    return Reply(msgspec.json.encode(Ready(True)))


async def model_ready(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v2/models/{id}/ready: as GET /ready, if the model exists.

    Raises:
        ModelNotFound: if there is no model of that name.
    """
    name = operations.asked_model(service, record)
    await operations.ready(service, record, body)
    return Reply(msgspec.json.encode(ModelReady(name, True)))


async def model(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v2/models/{id}

    Raises:
        ModelNotFound: if there is no model of that name.
    """
    return Reply(msgspec.json.encode(ModelMetadata(operations.asked_model(service, record), [], NAME, [], [])))
