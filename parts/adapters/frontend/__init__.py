"""Adapters in a frontend: the models that they make, and how administrators load and unload them."""

from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct

from penstock.frontend.api.body import read
from penstock.frontend.api.service import Service
from penstock.frontend.exchange.exchange import Request, Route
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.frontend.exchange.statuses import READS_BODY
from penstock.frontend.part import FrontendPart
from penstock.parts.adapters.frontend.catalogue import Catalogue
from penstock.parts.adapters.frontend.totals import Live, Totals
from penstock.parts.adapters.options import AdapterOptions

TEXT = "text/plain; charset=utf-8"

_Name = Annotated[str, Meta(min_length=1, max_length=128)]


class LoadRequest(Struct):
    """What to load, as vLLM names it."""

    lora_name: _Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]  # a folder, or a name of the hub
    load_inplace: bool = False  # it may replace an adapter of this name


class UnloadRequest(Struct):
    """What to unload, as vLLM names it."""

    lora_name: _Name
    lora_int_id: int | None = None  # the name is enough
    abort: bool = False  # its streams end with an error; otherwise they go on to their end


_LOAD: msgspec.json.Decoder[LoadRequest] = msgspec.json.Decoder(LoadRequest)
_UNLOAD: msgspec.json.Decoder[UnloadRequest] = msgspec.json.Decoder(UnloadRequest)


async def load_adapter(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /v1/load_lora_adapter: answers once all engines have it.

    Raises:
        InvalidParameter: it cannot be loaded, or there is one of this name.
        Unavailable: no engine is ready, or they take too long.
    """
    request = await read(_LOAD, record, body)
    name = request.lora_name
    await _adapters(service).catalogue.load(name, request.lora_path, in_place=request.load_inplace)
    return Reply(f"Success: LoRA adapter '{name}' added successfully.".encode(), content_type=TEXT)


async def unload_adapter(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /v1/unload_lora_adapter

    Raises:
        ModelNotFound: there is none of this name.
        InvalidParameter: an option names it.
    """
    request = await read(_UNLOAD, record, body)
    _adapters(service).catalogue.unload(request.lora_name, abort=request.abort)
    return Reply(f"Success: LoRA adapter '{request.lora_name}' removed successfully.".encode(), content_type=TEXT)


def _adapters(service: Service) -> "Adapters":
    adapters = service.parts.get(Adapters)
    assert adapters is not None, "no option switches it off"
    return adapters


class Adapters(FrontendPart):
    """The adapters of one frontend."""

    routes = (
        Route(
            "POST", "/v1/load_lora_adapter", load_adapter, "Load an adapter, and serve it as a model",
            body=LoadRequest, errors=(*READS_BODY, 503), content_type=TEXT, scope="admin",
        ),
        Route(
            "POST", "/v1/unload_lora_adapter", unload_adapter, "Serve an adapter no more",
            body=UnloadRequest, errors=READS_BODY, content_type=TEXT, scope="admin",
        ),
    )  # fmt: skip

    def __init__(self, service: Service) -> None:
        self.catalogue = Catalogue(service)
        options = service.config.of(AdapterOptions)
        self._fixed = options.adapters
        self._totals = Totals(service.metrics)
        Live(service)
        service.metrics.max_adapters = options.max_loras
        service.observers = (*service.observers, self._note)

    @classmethod
    def of(cls, service: Service) -> Self:
        return cls(service)

    async def start(self) -> None:
        await self.catalogue.serve_fixed(self._fixed)

    async def close(self) -> None:
        await self.catalogue.close()

    async def serve(self, name: str, path: str) -> None:
        await self.catalogue.load(name, path, in_place=False)

    def _note(self, record: RequestRecord, route: Route, request: Request, now: float) -> None:
        if record.adapter:
            self._totals.note(record)


PARTS = (Adapters,)
