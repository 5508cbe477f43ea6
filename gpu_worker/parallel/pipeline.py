"""Messages between the stages of a pipeline: hidden states to the next stage, drawn tokens back to all others.

    stage 0   step 3 │ step 4 │ step 5        hidden states go to the next stage, from each rank to the one
    stage 1   step 2 │ step 3 │ step 4        with the same tensor number; the last stage sends the tokens to all
    stage 2   step 1 │ step 2 │ step 3        others, which need them for the rows' next step

No stage waits here: received messages are kept until their step is due, and sending uses sockets of its own. So a stage
computes one step while another one is in transit. Between CPUs the message contains the hidden states. Between GPUs the
message announces them, and `Ranks` moves them in the order of the steps.

A scheduler that takes over begins a new epoch. Messages about plans of an earlier epoch are dropped, because some
stages may never have received those plans.
"""

import secrets
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import zmq
from torch import Tensor

from penstock.gpu_worker.parallel.ranks import Ranks
from penstock.ipc.addresses import ipc_address, is_tcp
from penstock.ipc.curve import Doorkeeper, secure_caller, secure_listener
from penstock.ipc.key_file import ChannelKeys

_HEADER = struct.Struct("<qqqqqb")  # epoch, step, microseconds; then tokens, width and dtype of hidden states
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ADDRESS_BYTES = 256
UNKNOWN = -1
"""In place of a stage's microseconds, if its device is still computing when the stage hands on its result."""


class Handed(NamedTuple):
    """The output of the stage before for one step."""

    hidden: Tensor  # [T, H], in the dtype in which that stage computes; the receiver's own copy
    num_us: int  # microseconds that all stages so far took for the step, or UNKNOWN


class Pipeline:
    """One rank's view of the other stages."""

    def __init__(self, ranks: Ranks, rendezvous: str, device: torch.device, keys: ChannelKeys | None = None) -> None:
        """Every rank of the group must make this object at the same time.

        Args:
            ranks: the group.
            rendezvous: where the ranks have met: file:// if all are on this host.
            device: where hidden states are.
            keys: for sockets between hosts.
        """
        self.place = place = ranks.place
        self._ranks = ranks
        self._device = device
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._epoch = 0
        self._handed: dict[tuple[int, int], Handed] = {}  # by epoch and step
        self._tokens: list[tuple[int, bytes]] = []
        self._doorkeeper = None if keys is None else Doorkeeper(self._context, keys)
        self.inbox, address = _listen(self._context, rendezvous, keys)
        """The socket to poll; `take` reads it."""
        addresses = _exchanged(ranks, address, device)
        ahead = [place.stage + 1] if not place.is_last_stage else []
        back = range(place.stage) if place.is_last_stage else ()
        self._outboxes = {stage: _call(self._context, addresses[stage], keys) for stage in (*ahead, *back)}

    def begin(self, epoch: int) -> None:
        """Forget messages about plans of earlier schedulers. A later scheduler has a larger number."""
        self._epoch = epoch
        self._tokens.clear()
        self._handed = {key: handed for key, handed in self._handed.items() if key[0] >= epoch}

    # --- sending --------------------------------------------------------------------------------

    def hand_on(self, step_id: int, hidden: Tensor, num_us: int) -> None:
        """Send the next stage a step's hidden states [T, H], and the time of all stages so far, or UNKNOWN."""
        num_tokens, width = hidden.shape
        kind = _DTYPES.index(hidden.dtype)
        header = _HEADER.pack(self._epoch, step_id, num_us, num_tokens, width, kind)
        to = self.place.stage + 1
        if hidden.is_cuda:
            self._outboxes[to].send_multipart([header, b""])
            self._ranks.send(hidden, to)
        else:
            self._outboxes[to].send_multipart([header, _bytes_of(hidden.contiguous()).data])

    def tell(self, step_id: int, tokens: bytes) -> None:
        """Send all earlier stages the tokens that a step's sampling rows have drawn, int32[S']."""
        header = _HEADER.pack(self._epoch, step_id, 0, 0, 0, 0)
        for outbox in self._outboxes.values():
            outbox.send_multipart([header, tokens])

    # --- receiving ------------------------------------------------------------------------------

    def take(self) -> None:
        """Take all messages that have arrived."""
        while True:
            try:
                header, payload = self.inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            epoch, step_id, num_us, num_tokens, width, kind = _HEADER.unpack(header.buffer)
            if width == 0:
                if epoch == self._epoch:
                    self._tokens.append((step_id, payload.bytes))
                continue
            hidden = torch.empty(num_tokens, width, dtype=_DTYPES[kind], device=self._device)
            if len(payload.buffer):
                _bytes_of(hidden)[:] = np.frombuffer(payload.buffer, dtype=np.uint8)
            else:  # receive it even if it is not wanted, since later tensors come after it
                self._ranks.receive(hidden, self.place.stage - 1)
            if epoch >= self._epoch:  # the stage before may already know the next scheduler
                self._handed[epoch, step_id] = Handed(hidden, num_us)

    def has(self, step_id: int) -> bool:
        """Whether the stage before has handed on this step."""
        return (self._epoch, step_id) in self._handed

    def handed(self, step_id: int) -> Handed:
        """Return the output of the stage before for a step; each can be taken once."""
        return self._handed.pop((self._epoch, step_id))

    def take_tokens(self) -> list[tuple[int, bytes]]:
        """Return the steps whose tokens have arrived since the last call, each with its tokens, int32[S']."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def close(self) -> None:
        """Close the sockets; queued messages are dropped."""
        for each in (self.inbox, *self._outboxes.values()):
            each.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        self._context.term()


def _bytes_of(hidden: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor's memory."""
    found: npt.NDArray[np.uint8] = hidden.view(torch.uint8).view(-1).numpy()
    return found


def _listen(
    context: zmq.Context[zmq.Socket[bytes]], rendezvous: str, keys: ChannelKeys | None
) -> tuple[zmq.Socket[bytes], str]:
    """A socket that the other stages can reach, and its address."""
    kind, _, where = rendezvous.partition("://")
    inbox = _unbounded(context.socket(zmq.PULL))
    if kind == "file":
        address = ipc_address(Path(where).parent, f"stage-{secrets.token_hex(4)}")
        inbox.bind(address)
        return inbox, address
    host, _, port = where.rpartition(":")
    family, _, _, _, there = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # finds this host's own address there, and sends nothing
        probe.connect(there)
        own = probe.getsockname()[0]
    if family == socket.AF_INET6:
        inbox.setsockopt(zmq.IPV6, 1)
        own = f"[{own}]"
    if keys is not None:
        secure_listener(inbox, keys)
    return inbox, f"tcp://{own}:{inbox.bind_to_random_port(f'tcp://{own}')}"


def _call(context: zmq.Context[zmq.Socket[bytes]], address: str, keys: ChannelKeys | None) -> zmq.Socket[bytes]:
    outbox = _unbounded(context.socket(zmq.PUSH))
    if is_tcp(address):
        outbox.setsockopt(zmq.IPV6, "[" in address)
        if keys is not None:
            secure_caller(outbox, keys)
    outbox.connect(address)
    return outbox


def _unbounded(its: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Remove the limits of a socket's queues: plans in flight limit them, and a full queue would block a stage."""
    its.setsockopt(zmq.LINGER, 0)
    its.setsockopt(zmq.SNDHWM, 0)
    its.setsockopt(zmq.RCVHWM, 0)
    return its


def _exchanged(ranks: Ranks, address: str, device: torch.device) -> Mapping[int, str]:
    """The addresses of the ranks with the same tensor number, by stage."""
    place, found = ranks.place, {ranks.place.stage: address}
    own = torch.tensor(list(address.encode().ljust(_ADDRESS_BYTES)), dtype=torch.uint8, device=device)
    for stage in range(place.num_stages):  # all stages go through pairs in the same order, so there is no deadlock
        if stage == place.stage:
            continue
        if place.stage < stage:
            ranks.send(own, stage)
        theirs = ranks.receive(torch.empty_like(own), stage)
        if place.stage > stage:
            ranks.send(own, stage)
        found[stage] = bytes(theirs.tolist()).decode().strip()
    return found
