"""GET /v1/models as Anthropic's clients read it."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from penstock.frontend.api.operations import asked_model
from penstock.frontend.api.service import Service
from penstock.frontend.errors import InvalidParameter
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.parts.anthropic.frontend.schema import (
    EffortSupport,
    ModelCapabilities,
    ModelInfo,
    ModelInfoPage,
    ServerToolsSupport,
    Supported,
    ThinkingSupport,
    ThinkingTypes,
)

MAX_LISTED, DEFAULT_LISTED = 1000, 20

_YES, _NO = Supported(True), Supported(False)


async def list_models(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v1/models: a page of the served names.

    Raises:
        InvalidParameter: if the query is not understood.
    """
    return page(model_infos(service), record.query)


def model_infos(service: Service) -> list[ModelInfo]:
    """All models of a service, under each of their names."""
    return [_info(service.view(name), name) for name in service.names]


def page(infos: list[ModelInfo], query: Mapping[str, str]) -> Reply:
    """The models that a query asks for.

    Raises:
        InvalidParameter: if the query is not understood.
    """
    limit = query.get("limit", str(DEFAULT_LISTED))
    if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidParameter(f"limit must be a number from 1 to {MAX_LISTED}", param="limit")
    places = {info.id: index for index, info in enumerate(infos)}
    if "after_id" in query:
        infos = infos[places.get(query["after_id"], len(infos)) + 1 :]
        shown = infos[: int(limit)]
    elif "before_id" in query:
        infos = infos[: places.get(query["before_id"], 0)]
        shown = infos[-int(limit) :]
    else:
        shown = infos[: int(limit)]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return Reply(msgspec.json.encode(ModelInfoPage(shown, first, last, has_more=len(infos) > len(shown))))


async def show_model(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /v1/models/{id}

    Raises:
        ModelNotFound: if there is no model of that name.
    """
    name = asked_model(service, record)
    return Reply(msgspec.json.encode(_info(service.view(name), name)))


def _info(service: Service, name: str) -> ModelInfo:
    created = datetime.fromtimestamp(service.created, UTC)
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=created.isoformat().replace("+00:00", "Z"),
        max_input_tokens=service.max_model_len,
        max_tokens=service.max_model_len,
        capabilities=_capabilities(service),
    )


def _capabilities(service: Service) -> ModelCapabilities:
    template = service.model.template
    reasons = Supported(service.model.reasoning_format is not None)
    effort = Supported(template is not None and "reasoning_effort" in template.extra_variables)
    return ModelCapabilities(
        thinking=ThinkingSupport(reasons.supported, ThinkingTypes(reasons, _YES, _YES, reasons)),
        effort=EffortSupport(effort.supported, effort, effort, effort, effort, effort),
        structured_outputs=_YES,
        batch=_NO,
        citations=_NO,
        code_execution=_NO,
        context_management=_NO,
        image_input=Supported(service.image_limits is not None),
        pdf_input=_NO,
        server_tools=ServerToolsSupport(False, _NO, _NO),
    )
