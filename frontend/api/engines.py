"""Routes about the engines behind the server, for administrators: their states, draining, restarting."""

import msgspec

from penstock.frontend import schema
from penstock.frontend.api.body import decode
from penstock.frontend.api.service import Service
from penstock.frontend.engine.link import EngineLink
from penstock.frontend.errors import EngineNotFound, InvalidParameter, InvalidRequest, Unavailable
from penstock.frontend.exchange.replies import Reply, RequestRecord
from penstock.ipc.messages import DrainEngine, SetRole


async def list_engines(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """GET /engines"""
    return Reply(msgspec.json.encode(schema.EngineList([_status(service, link) for link in service.engine.links])))


async def drain_engine(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /engines/{id}/drain: move the engine's requests to others; without others, they finish where they are.

    Raises:
        EngineNotFound: if there is no engine of that name.
        Unavailable: if it cannot be reached.
    """
    return _order(service, record, DrainEngine())


async def restart_engine(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /engines/{id}/restart: drain the engine, then restart its processes. Raises the same errors."""
    return _order(service, record, DrainEngine(restarts=True))


async def undrain_engine(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /engines/{id}/undrain: let the engine take requests again. Raises the same errors."""
    return _order(service, record, DrainEngine(is_draining=False))


async def set_role(service: Service, record: RequestRecord, body: bytes) -> Reply:
    """POST /engines/{id}/role: set the engine's role for new requests; those that it has are not affected.

    Raises:
        InvalidParameter: if there is no such role.
        InvalidRequest: if the engine was started without a role.
        EngineNotFound, Unavailable: as above.
    """
    wanted = decode(schema.ROLE, body).role
    role = next((known for known in schema.ROLES if known == wanted), None)
    if role is None:
        raise InvalidParameter("role must be 'both', 'prefill' or 'decode'", param="role")
    link = _link_to(service, record.argument)
    if not (link.last_facts and link.last_facts.role):
        raise InvalidRequest("the engine was started without --role: it hands no KV pages over, and can have no role")
    service.engine.order(link, SetRole(role))
    return Reply(msgspec.json.encode(msgspec.structs.replace(_status(service, link), role=role)))


def _order(service: Service, record: RequestRecord, order: DrainEngine) -> Reply:
    link = _link_to(service, record.argument)
    service.engine.order(link, order)
    return Reply(msgspec.json.encode(_status(service, link)))


def _link_to(service: Service, label: str) -> EngineLink:
    book = service.engine
    link = next((link for link in book.links if book.label(link) == label), None)
    if link is None:
        known = ", ".join(map(book.label, book.links))
        raise EngineNotFound(f"there is no engine {label[:64]!r}; there is: {known}")
    if link.last_facts is None:
        raise Unavailable(f"engine {label} cannot be reached: {link.not_ready_reason}")
    return link


def _status(service: Service, link: EngineLink) -> schema.EngineStatus:
    facts, stats = link.last_facts, link.stats
    return schema.EngineStatus(
        id=service.engine.label(link),
        state=link.state,
        reason=link.not_ready_reason if link.state == "not ready" else None,
        start_id=None if facts is None else facts.start_id,
        num_ranks=None if facts is None else facts.num_ranks,
        running=0 if stats is None else stats.num_running,
        waiting=0 if stats is None else stats.num_waiting,
        paused=0 if stats is None else stats.num_paused,
        role="" if facts is None else facts.role,
    )
