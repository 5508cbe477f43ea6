"""The workers that hold one copy of a model (its ranks), treated as one worker.

hello     the group is ready once every rank has said hello; its sizes are the smallest of theirs; models must agree
plans     are encoded once; the same bytes go to every rank
results   are taken from the rank that answers; what answers of parts mean together, they say (`answers.py`)
death     the death of one rank is that of the group: the other ranks start afresh and say hello again
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from time import time_ns
from typing import Protocol

import structlog
import zmq
from msgspec.structs import replace

from penstock.config import Config
from penstock.config.parts import brought, with_parts
from penstock.core.engine.part import EnginePart
from penstock.core.scheduling.part import SchedulerPart
from penstock.core.scheduling.scheduler import Scheduler
from penstock.ipc.channel import PeerId, Router
from penstock.ipc.codec import Codec, MalformedMessage
from penstock.ipc.key_file import ChannelKeys
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    FromWorker,
    Heartbeat,
    Message,
    Refused,
    SayHello,
    StepResult,
    Welcome,
    WorkerFailed,
    WorkerHello,
)

log = structlog.get_logger()

_EQUAL = ("num_ranks", "model_fingerprint", "vocab_size", "page_size", "window_groups", "placement")
_rank_of: Callable[[WorkerHello], int] = attrgetter("rank")

_LEAST = ("max_model_len", "num_pages", "max_num_seqs", "max_num_batched_tokens", "num_host_pages")

STEP_SECONDS, STEP_SECONDS_PER_TOKEN = 120.0, 0.25
"""A step that takes longer than both together counts as hung. The times are generous: a step may have to compile
kernels, and a large model on a small CPU is slow."""

_LOOK_DELAY = 0.01
"""Seconds after a broken connection until sending fails, which shows which peer it was."""


_GATHER_SECONDS = 3.0
"""Most time from the first to the last hello of ranks that were a group already. If a scheduler dies while it sends a
plan, some ranks are in a step that the others never get, and they wait for each other."""


class Listener(Protocol):
    """Gets the group's events (`Engine`)."""

    def on_group_ready(self, hello: WorkerHello, *, has_died: bool) -> None:
        """All ranks are there, with empty rows. `has_died`: some processes are new."""

    def on_group_changed(self) -> None:
        """A rank starts afresh, so the others must too; no plan can be sent before `on_group_ready`."""

    def on_group_lost(self, reason: str, *, is_out_of_memory: bool) -> None:
        """A rank has died, or does not answer."""

    def on_step_result(self, result: StepResult) -> None:
        """The rank that answers has computed a step."""

    def on_answer(self, rank: WorkerHello, message: Message) -> None:
        """The group has sent something that is a part's; `rank`: the one whose message came last."""


class WorkerGroup:
    """The ranks that have said hello, and the socket to them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: Config,
        keys: ChannelKeys | None,
        listener: Listener,
        on_hung: Callable[[int], None],
    ) -> None:
        """`on_hung` gets the process id of each rank that no longer answers."""
        self._listener = listener
        self._on_hung = on_hung
        self._ranks: dict[PeerId, WorkerHello] = {}
        self._dismissed: set[PeerId] = set()  # told to say hello; messages before their hello are outdated
        self._says: dict[int, Heartbeat] = {}  # the last heartbeat of each rank
        heard = [kind.answers for kind in brought("scheduler", SchedulerPart)]
        heard += [kind.answers for kind in brought("scheduler", EnginePart)]
        self._answers = {message: make() for message, make in chain.from_iterable(heard)}
        self._pids: list[int] = []  # of the current or last group, by rank
        self.hello: WorkerHello | None = None
        """The hello of the current or last group; its sizes are the smallest of all ranks."""
        self.is_ready = False
        """Whether all ranks are there and accept plans."""
        self._gathering: asyncio.TimerHandle | None = None
        self._loop = loop = asyncio.get_running_loop()
        self.channel: Router[FromWorker] = Router(
            context,
            config.ipc.worker_address,
            Codec(with_parts(FromWorker, "FROM_WORKER")),
            self._on_message,
            config.ipc.heartbeat_timeout,
            keys,
            on_broken=lambda: loop.call_later(_LOOK_DELAY, self._notice_dead),
        )

    def why_not(self, protocol_version: int, model_fingerprint: str) -> str:
        """Return why a peer with this hello is refused; empty if it is accepted."""
        if protocol_version != PROTOCOL_VERSION:
            return f"protocol version {protocol_version} does not match the scheduler's version {PROTOCOL_VERSION}"
        if self.hello is not None and model_fingerprint != self.hello.model_fingerprint:
            return f"model {model_fingerprint} differs from this engine's model {self.hello.model_fingerprint}"
        return ""

    def send(self, message: Message) -> bool:
        """Send a message to all ranks; False if one of them is no longer connected, which ends the group."""
        missed = self.channel.broadcast(self._ranks, message)
        if missed:
            self._lose("it is no longer connected", missed, hung=missed)
        return not missed

    def lose_stuck(self, reason: str) -> None:
        """Give up the group, and tell the processes' parent: they may still hold memory that the next ones need."""
        self._lose(reason, list(self._ranks), hung=list(self._ranks))

    def check_progress(self, scheduler: Scheduler, seconds: float) -> None:
        """Give up a group that has returned no result for this many seconds.

        Workers are judged by their results only: a heartbeat shows that a process lives, not that its device works.
        """
        if not self.is_ready or seconds <= STEP_SECONDS:
            return
        if not scheduler.in_flight:
            if scheduler.is_on_trial:
                self.lose_stuck(f"what it was asked to make alone is not ready after {STEP_SECONDS:.0f} s")
            return
        step = scheduler.in_flight[0]
        most = STEP_SECONDS + STEP_SECONDS_PER_TOKEN * step.num_tokens
        if seconds > most:
            self.lose_stuck(f"step {step.step_id} of {step.num_tokens} tokens has no result after {most:.0f} s")

    def says(self) -> Heartbeat:
        """Return the sums over the last heartbeats of all ranks."""
        said = [
            (each.num_dropped, each.num_log_lines_dropped, each.device_memory_used, each.device_memory_total)
            for each in self._says.values()
        ]
        return Heartbeat(*map(sum, zip(*said, strict=True)))

    def _notice_dead(self) -> None:
        if not self.channel.is_closed:
            self.send(Heartbeat())

    # --- messages ---------------------------------------------------------------------------

    def _on_message(self, peer: PeerId, message: FromWorker) -> None:
        if isinstance(message, WorkerHello):
            self._on_hello(peer, message)
            return
        hello = self._ranks.get(peer)
        if hello is None:
            if peer in self._dismissed:
                return
            self.channel.send(peer, SayHello())
            raise MalformedMessage("it has not said hello, or was dropped")
        match message:
            case StepResult() if hello.answers and self.is_ready:
                self._listener.on_step_result(message)
            case WorkerFailed():
                log.error("worker failed", name=hello.name, step_id=message.step_id, reason=message.reason)
                self._lose(message.reason, [peer], is_out_of_memory=message.is_out_of_memory)
            case Heartbeat():
                self._says[hello.rank] = message
            case _ if (answers := self._answers.get(type(message))) is not None:
                if (self.is_ready or not answers.needs_group) and (answer := answers.take(hello, message)) is not None:
                    self._listener.on_answer(hello, answer)

    def _on_hello(self, peer: PeerId, hello: WorkerHello) -> None:
        self.send(Heartbeat())  # notices ranks that died before this one came
        refusal = self._refusal(peer, hello)
        if refusal:
            log.error("worker refused", name=hello.name, reason=refusal)
            self.channel.send(peer, Refused(refusal))
            return
        was_ready, self.is_ready = self.is_ready, False
        others = [each for each in self._ranks if each != peer]
        if was_ready:
            self._dismiss(others, is_broken=hello.pid not in self._pids)
        self._ranks[peer] = hello
        self._dismissed.discard(peer)
        if len(self._ranks) == hello.num_ranks:
            self._welcome()
        elif hello.was_welcomed and self._gathering is None:
            self._gathering = self._loop.call_later(_GATHER_SECONDS, self._stop_gathering)
        if was_ready and not self.is_ready:
            self._listener.on_group_changed()

    def _stop_gathering(self) -> None:
        """Some ranks are missing: dismiss those that are there, so that the whole group starts again."""
        self._gathering = None
        if not self.is_ready and not self.channel.is_closed:
            log.warning("ranks missing, group restarting", there=sorted(map(_rank_of, self._ranks.values())))
            self._dismiss(list(self._ranks), is_broken=True)

    def _refusal(self, peer: PeerId, hello: WorkerHello) -> str:
        if refusal := self.why_not(hello.protocol_version, hello.model_fingerprint):
            return refusal
        if hello.rank >= hello.num_ranks:
            return f"there is no rank {hello.rank} in a group of {hello.num_ranks}"
        for other in (each for each_peer, each in self._ranks.items() if each_peer != peer):
            if other.rank == hello.rank:
                return "another worker is already serving"
            for field in _EQUAL:
                own, theirs = getattr(hello, field), getattr(other, field)
                if own != theirs:
                    return f"{field} is {own} on rank {hello.rank}, but {theirs} on rank {other.rank}"
        return ""

    def _welcome(self) -> None:
        """All ranks are there."""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        hellos = sorted(self._ranks.values(), key=_rank_of)
        pids = [hello.pid for hello in hellos]
        has_died = self.hello is not None and self._pids != pids
        least = {field: min(getattr(hello, field) for hello in hellos) for field in _LEAST}
        sources = tuple(source for hello in hellos for source in hello.kv_sources)
        # Each rank has a part of each page, and all ranks move their parts at the same time.
        sums = {
            field: sum(getattr(hello, field) for hello in hellos)
            for field in ("page_bytes", "draft_page_bytes", "host_copy_speed")
        }
        weights = _joined([hello.weights for hello in hellos])
        self.hello, self._pids = replace(hellos[0], **least, **sums, weights=weights, kv_sources=sources), pids
        for answers in self._answers.values():
            answers.clear()
        self._dismissed.clear()
        self.is_ready = True
        self.channel.broadcast(
            self._ranks, Welcome(PROTOCOL_VERSION, time_ns())
        )  # a rank that does not get this is noticed at the next plan
        for hello in hellos:
            log.info("worker connected", name=hello.name, device=hello.device, dtype=hello.dtype, pages=hello.num_pages)
        self._listener.on_group_ready(self.hello, has_died=has_died)

    # --- deaths -----------------------------------------------------------------------------

    def _lose(
        self,
        reason: str,
        lost: Collection[PeerId],
        *,
        hung: Collection[PeerId] = (),
        is_out_of_memory: bool = False,
    ) -> None:
        """Drop the lost ranks. If the group was ready, it is lost with them, and the other ranks start afresh."""
        for peer in hung:
            if pid := self._ranks[peer].pid:
                self._on_hung(pid)
        for peer in lost:
            del self._ranks[peer]
        if self.is_ready:
            self.is_ready = False
            self._dismiss(list(self._ranks), is_broken=True)
            self._listener.on_group_lost(reason, is_out_of_memory=is_out_of_memory)

    def _dismiss(self, peers: Collection[PeerId], *, is_broken: bool) -> None:
        """Make these ranks start afresh: they say hello again, or end if they cannot go on without the lost ones."""
        missed = self.channel.broadcast(peers, SayHello(is_broken))
        self._dismissed.update(peer for peer in peers if peer not in missed)
        for peer in peers:
            del self._ranks[peer]


def _joined(digests: Sequence[str]) -> str:
    """One digest for all ranks: each has read the whole weights, or a part of them."""
    if len(set(digests)) == 1:
        return digests[0]
    return blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()
