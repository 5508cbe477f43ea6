"""Pages read by NIXL: from GPU to GPU over NVLink or RDMA, or whatever its backends offer.

Written against NIXL's documented Python API (`nixl._api.nixl_agent`: `register_memory`, `get_agent_metadata`,
`add_remote_agent`, `get_xfer_descs`, `initialize_xfer` with "READ", `transfer`, `check_xfer_state`,
`release_xfer_handle`). It has not been run with NIXL itself, which needs such hardware. Tests replace NIXL by a fake
with the same methods, which copies.
"""

import base64
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.ipc.messages import KVSource, Message
from penstock.parts.handover.worker.transports.shared_memory import runs
from penstock.parts.handover.worker.transports.transport import Pool, Read, Reader, TransportError

_LOOK_SECONDS = 0.0002
"""Between two checks of a transfer that must end before its reader is closed."""


class Nixl:
    """See `Transport`. One agent registers the whole pool once."""

    def __init__(self, pool: Pool) -> None:
        """Raises TransportError if NIXL is not installed, or cannot register the pool."""
        try:
            from nixl._api import nixl_agent  # an optional package with GPU libraries of its own
        except ImportError:
            raise TransportError("NIXL is not installed (pip install nixl)") from None
        self._pool = pool
        try:
            self._agent: Any = nixl_agent(f"penstock-{secrets.token_hex(8)}")
            self._registered: Any = self._agent.register_memory(pool.blocks)
        except Exception as error:  # whatever its backends raise, since there are other transports
            raise TransportError(f"NIXL cannot register the KV pool: {error}") from None

    def place(self) -> bytes | None:
        blocks = self._pool.blocks
        device = blocks.device.index or 0
        agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        known = {"agent": agent, "address": blocks.data_ptr(), "pages": blocks.shape[1], "device": device}
        return json.dumps(known | {"memory": _memory(blocks)}).encode()

    def reader(self, source: KVSource, send: Callable[[Message], None]) -> Reader:
        theirs = json.loads(source.places["nixl"])
        try:
            peer = self._agent.add_remote_agent(base64.b64decode(theirs["agent"]))
        except Exception as error:
            raise TransportError(f"NIXL cannot reach the other worker: {error}") from None
        return _AgentReader(self._agent, peer, theirs, self._pool.blocks)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


def _memory(blocks: torch.Tensor) -> str:
    return "VRAM" if blocks.device.type == "cuda" else "DRAM"


class _AgentReader:
    """One NIXL transfer for each read."""

    polls = True

    def __init__(self, agent: Any, peer: Any, theirs: dict[str, Any], blocks: torch.Tensor) -> None:
        self._agent = agent
        self._peer = peer
        self._theirs = theirs
        self._blocks = blocks
        self._part_bytes = blocks.shape[2] * blocks.element_size()
        self._under_way: dict[int, Any] = {}

    def begin(self, read: Read) -> None:
        size, blocks, theirs = self._part_bytes, self._blocks, self._theirs
        local, remote = [], []
        for their_page, our_page, count in runs(read):
            for part in range(read.parts.start, read.parts.stop):
                ours = blocks.data_ptr() + (part * blocks.shape[1] + our_page) * size
                there = theirs["address"] + (part * theirs["pages"] + their_page) * size
                local.append((ours, count * size, blocks.device.index or 0))
                remote.append((there, count * size, theirs["device"]))
        try:
            to = self._agent.get_xfer_descs(local, mem_type=_memory(blocks))
            of = self._agent.get_xfer_descs(remote, mem_type=theirs["memory"])
            handle = self._agent.initialize_xfer("READ", to, of, self._peer)
            self._under_way[read.number] = handle
            state = self._agent.transfer(handle)
        except Exception as error:
            raise TransportError(f"NIXL: {error}") from None
        if state == "ERR":
            raise TransportError("NIXL cannot begin a transfer")

    def take_done(self) -> list[int]:
        done = []
        for number, handle in list(self._under_way.items()):
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._agent.release_xfer_handle(self._under_way.pop(number))
                done.append(number)
            elif state != "PROC":
                raise TransportError(f"a NIXL transfer ended as {state}")
        return done

    def take(self, number: int, data: memoryview) -> None:
        pass

    def stop(self, number: int) -> bool:
        return number not in self._under_way

    def close(self) -> None:
        for handle in self._under_way.values():
            while self._agent.check_xfer_state(handle) == "PROC":
                time.sleep(_LOOK_SECONDS)  # the transfer would still write to this worker's pages
            self._agent.release_xfer_handle(handle)
        self._under_way.clear()
        self._agent.remove_remote_agent(self._peer)
