"""All transports, the best first."""

import structlog

from penstock.parts.handover.options import KVTransportName
from penstock.parts.handover.worker.transports.transport import Pool, Transport, TransportError

log = structlog.get_logger()

NAMES: tuple[str, ...] = ("shared_memory", "nixl", "zmq")


def make_transport(name: str, pool: Pool) -> Transport:
    """Return a transport of this worker.

    Raises:
        TransportError: if the transport cannot be used here.
    """
    match name:
        case "shared_memory":
            from penstock.parts.handover.worker.transports.shared_memory import SharedMemory

            return SharedMemory(pool)
        case "nixl":
            from penstock.parts.handover.worker.transports.nixl import Nixl

            return Nixl(pool)
        case _:
            from penstock.parts.handover.worker.transports.zmq import Sockets

            return Sockets(pool)


def make_transports(wanted: KVTransportName, pool: Pool) -> dict[str, Transport]:
    """Return the transports that can be used here, the best first.

    Raises:
        TransportError: if a single transport is wanted, and cannot be used.
    """
    found: dict[str, Transport] = {}
    for name in NAMES if wanted == "auto" else (wanted,):
        try:
            found[name] = make_transport(name, pool)
        except TransportError as error:
            if wanted != "auto":
                raise
            log.info("KV transport not available", transport=name, reason=str(error))
    return found
