"""The frontend's neighbour: a real ROUTER that answers real messages, with tokens from a script."""

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import zmq

from penstock.config.parts import with_parts
from penstock.ipc.channel import PeerId, Router
from penstock.ipc.codec import Codec
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    EngineNotReady,
    EngineReady,
    EngineStats,
    ErrorCode,
    FinishReason,
    FromFrontend,
    FrontendHello,
    Goodbye,
    Heartbeat,
    Message,
    PauseRequest,
    Refused,
    ResumeRequest,
    SayHello,
    SequenceDelta,
    SequenceProgress,
    TokenBatch,
    TokenLogprobs,
)


@dataclass(frozen=True)
class Script:
    """What the scheduler answers for one sequence. When the tokens run out it stops with the first stop id."""

    token_ids: list[int] = field(default_factory=list)
    per_step: int = 1
    delay: float = 0.0  # seconds before each step and before the end
    hangs: bool = False  # after the tokens: no end, until it is aborted
    error: str = ""  # ends with this after the tokens
    error_code: ErrorCode | None = None
    finish: FinishReason | None = None  # ends with this after the tokens
    num_cached_tokens: int = 0
    late: str = ""  # why it was served behind others
    pooled: bytes = b""  # fp32[k], told in place of the tokens


def prompt_ids(request: AddRequest) -> list[int]:
    """The token ids of a request's prompt."""
    return list(struct.unpack(f"<{len(request.prompt_token_ids) // 4}i", request.prompt_token_ids))


def logprob_of(token_id: int) -> float:
    """What this "model" thinks of a token, whatever comes before it; exact in fp32."""
    return -token_id / 64


def scores(token_ids: list[int], num_best: int) -> TokenLogprobs:
    """Log-probabilities of tokens; the most likely ones in any place are those with the lowest ids."""
    best = list(range(num_best))
    ids = [i for token_id in token_ids for i in (token_id, *best)]
    values = [logprob_of(i) for i in ids]
    ranks = [token_id + 1 for token_id in token_ids]
    return TokenLogprobs(
        struct.pack(f"<{len(ids)}i", *ids),
        struct.pack(f"<{len(ids)}f", *values),
        struct.pack(f"<{len(ranks)}i", *ranks),
    )


def echo(request: AddRequest, sequence_idx: int) -> Script:
    """The default script: the prompt's ids, without special ones, shifted by the sequence's index."""
    ids = [token_id for token_id in prompt_ids(request) if token_id > 2]
    return Script([ids[(i + sequence_idx) % len(ids)] for i in range(len(ids))] if ids else [])


class FakeScheduler:
    """Lives in a running event loop. Everything it was sent is in `received`, in order."""

    def __init__(
        self,
        address: str,
        *,
        vocab_size: int,
        max_model_len: int = 512,
        is_ready: bool = True,
        takes_images: bool = False,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        codec: Codec[FromFrontend] = Codec(with_parts(FromFrontend, "FROM_FRONTEND"))
        self.router: Router[FromFrontend] = Router(self._context, address, codec, self._on_message)
        self.address = self.router.address
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.is_ready = is_ready
        self._takes_images = takes_images
        self.script: Callable[[AddRequest, int], Script] = echo
        self.received: list[FromFrontend] = []
        self.peers: dict[PeerId, None] = {}
        self.refusal = ""
        self.on_other: Callable[[PeerId, Message], None] = lambda peer, message: None  # parts' messages, and hellos
        self.is_silent = False  # as if it hung: it takes nothing and says nothing
        self._paused: dict[str, asyncio.Event] = {}  # set when they may go on
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._beat = asyncio.create_task(self._heartbeats())

    @property
    def added(self) -> list[AddRequest]:
        return [message for message in self.received if isinstance(message, AddRequest)]

    @property
    def aborted(self) -> list[AbortRequest]:
        return [message for message in self.received if isinstance(message, AbortRequest)]

    @property
    def num_paused(self) -> int:
        """Requests whose clients do not read."""
        return len(self._paused)

    @property
    def num_running(self) -> int:
        """Sequences without an end yet."""
        return len(self._tasks)

    def set_ready(self, is_ready: bool) -> None:
        """A worker comes or goes; all frontends are told."""
        self.is_ready = is_ready
        for peer in self.peers:
            self.router.send(peer, self._readiness())

    def forget_peers(self) -> None:
        """As after a restart: nobody is known, nothing runs."""
        self.peers.clear()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def tell(self, message: Message) -> None:
        """Send a message to all frontends."""
        for peer in self.peers:
            self.router.send(peer, message)

    def throw(self, frames: list[bytes]) -> None:
        """Send all frontends what is no message."""
        for peer in self.peers:
            for frame in frames:
                self.router._socket.send_multipart((peer, frame))

    def stats(self, **changes: int) -> EngineStats:
        values = {each.name: 0 for each in msgspec.structs.fields(EngineStats) if each.type in (int, float)}
        return EngineStats(**values | changes, is_ready=self.is_ready)  # type: ignore[arg-type]

    def close(self) -> None:
        self._beat.cancel()
        self.forget_peers()
        self.router.close()
        self._context.term()

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if not self.is_silent:
                self.tell(Heartbeat())

    def _readiness(self) -> EngineReady | EngineNotReady:
        if not self.is_ready:
            return EngineNotReady("no worker is connected")
        facts = EngineReady(PROTOCOL_VERSION, "0" * 16, self._max_model_len, self._vocab_size, 16, 100, 8)
        return msgspec.structs.replace(facts, takes_images=self._takes_images)

    def _on_message(self, peer: PeerId, message: FromFrontend) -> None:
        if self.is_silent:
            return
        self.received.append(message)
        if isinstance(message, FrontendHello):
            self.peers[peer] = None
            self.router.send(peer, Refused(self.refusal) if self.refusal else self._readiness())
            self.on_other(peer, message)
        elif peer not in self.peers:
            if not isinstance(message, Goodbye):
                self.router.send(peer, SayHello())
        elif isinstance(message, AddRequest):
            for sequence_idx in [resumed.sequence_idx for resumed in message.progress] or range(message.n):
                key = (message.request_id, sequence_idx)
                task = asyncio.get_running_loop().create_task(self._answer(peer, message, sequence_idx))
                self._tasks[key] = task
                task.add_done_callback(partial(self._forget, key))
        elif isinstance(message, PauseRequest):
            self._paused[message.request_id] = asyncio.Event()
        elif isinstance(message, ResumeRequest):
            self._paused.pop(message.request_id).set()
        elif isinstance(message, AbortRequest):
            for key, task in list(self._tasks.items()):
                if key[0] == message.request_id and message.sequence_idx in (-1, key[1]):
                    task.cancel()
        else:
            self.on_other(peer, message)

    def _forget(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)

    async def _answer(self, peer: PeerId, request: AddRequest, sequence_idx: int) -> None:
        script = self.script(request, sequence_idx)
        sampling = request.sampling
        token_ids = script.token_ids
        if not (script.hangs or script.error or script.finish) and sampling.stop_token_ids:
            token_ids = [*token_ids, sampling.stop_token_ids[0]]
        if script.pooled:
            self._send(peer, SequenceDelta(request.request_id, sequence_idx, (), "stop", pooled=script.pooled))
            return
        step: list[int] = []
        known = {resumed.sequence_idx: resumed for resumed in request.progress}.get(sequence_idx, SequenceProgress(0))
        num_known = len(known.token_ids) // 4
        assert struct.pack(f"<{num_known}i", *token_ids[:num_known]) == known.token_ids
        is_first = not num_known
        if sampling.prompt_logprobs >= 0 and sequence_idx == 0:
            told = prompt_ids(request)[1 + known.num_prompt_logprobs :]
            for part in filter(None, (told[:2], told[2:])):  # as from two chunks
                of_prompt = scores(part, sampling.prompt_logprobs)
                self._send(peer, SequenceDelta(request.request_id, 0, (), prompt_logprobs=of_prompt))
        for position, token_id in enumerate(token_ids[num_known:], start=1 + num_known):
            step.append(token_id)
            stops = token_id in sampling.stop_token_ids and position > sampling.min_tokens
            reason: FinishReason | None = None
            if stops:
                reason = "stop"
            elif position == sampling.max_tokens:
                reason = "length"
            if reason is None and len(step) < script.per_step and position < len(token_ids):
                continue
            await asyncio.sleep(script.delay)
            if request.request_id in self._paused:
                await self._paused[request.request_id].wait()
            cached = script.num_cached_tokens if is_first else 0
            late = script.late if is_first else ""
            is_first = False
            stop_id = token_id if stops else None
            told_of = scores(step, sampling.num_logprobs) if sampling.num_logprobs >= 0 else None
            delta = SequenceDelta(
                request.request_id, sequence_idx, tuple(step), reason, stop_id, cached, logprobs=told_of, late=late
            )
            self._send(peer, delta)
            if reason is not None:
                return
            step = []
        if script.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(script.delay)
        reason = "error" if script.error else script.finish or "length"
        end = SequenceDelta(
            request.request_id, sequence_idx, (), reason, error=script.error, error_code=script.error_code
        )
        self._send(peer, end)

    def _send(self, peer: PeerId, delta: SequenceDelta) -> None:
        self.router.send(peer, TokenBatch(0, (delta,)))
