"""The client side of the load: streams answers and notes when tokens arrive, with little work per chunk."""

import asyncio
import itertools
import time
from collections.abc import Iterator

import aiohttp
import msgspec
from msgspec import Struct

from penstock.bench.load.job import Job, Outcome, PlannedRequest


class StreamError(Exception):
    """The stream broke the protocol, or brought an error event."""


_NOTHING = (b"", b"null", b"[]")


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same, as older servers call it
    tool_calls: msgspec.Raw = msgspec.Raw()

    @property
    def brings_tokens(self) -> bool:
        """Whether it has a part of an answer, or of what comes before it."""
        return bool(self.content or self.reasoning or self.reasoning_content) or bytes(self.tool_calls) not in _NOTHING


class _Choice(Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class SSEReader:
    """Splits received bytes into the data of server-sent events, whatever the borders of the packets."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data lines that are complete with these bytes; comments and other fields are skipped."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


class StreamClock:
    """Follows one stream: arrivals that bring tokens, counts, the end."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.arrivals: list[float] = []
        self.usage: _Usage | None = None
        self.finish_reason = ""
        self.is_done = False
        self._num_ids = 0
        self._num_chunks = 0

    def event(self, data: bytes, now: float) -> None:
        """One event's data, received at `now`.

        Raises:
            StreamError: for an error event, or one that is no completion chunk.
        """
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            raise StreamError(f"not a completion chunk ({error}): {data[:200].decode(errors='replace')}") from None
        if chunk.error:
            raise StreamError(bytes(chunk.error).decode(errors="replace")[:300])
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
            has_text = bool(choice.text) if choice.delta is None else choice.delta.brings_tokens
            if has_text or choice.token_ids:
                if not self.arrivals or self.arrivals[-1] != now:
                    self.arrivals.append(now)  # several chunks of one packet arrive together
                self._num_ids += len(choice.token_ids) if choice.token_ids else 0
                self._num_chunks += 1
        if chunk.usage is not None:
            self.usage = chunk.usage

    def outcome(self, offset: float) -> Outcome:
        """What is to report of a finished stream; `offset` is the job's start on this clock."""
        usage = self.usage or _Usage()
        counted = usage.completion_tokens if usage.completion_tokens is not None else self._num_ids
        is_counted_by_chunks = not counted
        first, last = self.arrivals[0], self.arrivals[-1]
        return Outcome(
            start=self.started - offset,
            ttft=first - self.started,
            e2e=last - self.started,
            gaps=[later - earlier for earlier, later in itertools.pairwise(self.arrivals)],
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=(usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0,
            num_output_tokens=self._num_chunks if is_counted_by_chunks else counted,
            is_counted_by_chunks=is_counted_by_chunks,
            finish_reason=self.finish_reason,
        )


async def run_job(job: Job) -> list[Outcome]:
    """Send every request of a job at its time and wait for all answers; the outcomes in the job's order."""
    limit = asyncio.Semaphore(job.concurrency) if job.concurrency else None
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=3600, force_close=not job.reuses_connections)
    timeout = aiohttp.ClientTimeout(total=job.timeout, connect=min(60.0, job.timeout))
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if job.api_key:
        headers["Authorization"] = f"Bearer {job.api_key}"
    bodies = [_body(job, request) for request in job.requests]  # now, so that it costs nothing later
    await asyncio.sleep(max(0.0, job.start_at - time.time()))
    zero = time.perf_counter()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def one(request: PlannedRequest, body: bytes) -> Outcome:
            await asyncio.sleep(max(0.0, zero + request.arrival - time.perf_counter()))
            if limit is None:
                return await _ask(session, job, request, body, zero)
            async with limit:
                return await _ask(session, job, request, body, zero)

        return await asyncio.gather(*map(one, job.requests, bodies))


def _body(job: Job, request: PlannedRequest) -> bytes:
    fields: dict[str, object] = {
        "model": job.model,
        "max_tokens": request.max_tokens,
        "temperature": job.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.ignore_eos:
        fields["ignore_eos"] = True
    if job.token_ids:
        fields["return_token_ids"] = True
    if job.endpoint == "chat":
        fields["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        fields["prompt"] = request.prompt
    fields |= request.more
    return msgspec.json.encode(fields)


async def _ask(session: aiohttp.ClientSession, job: Job, request: PlannedRequest, body: bytes, zero: float) -> Outcome:
    """One request from sending to the last byte. Every failure becomes an outcome with an error."""
    path = "/chat/completions" if job.endpoint == "chat" else "/completions"
    headers = {"Authorization": f"Bearer {request.api_key}"} if request.api_key else None
    clock = StreamClock(time.perf_counter())
    try:
        async with session.post(job.base_url + path, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:300]
                return _failure(clock, zero, f"HTTP {response.status}: {text}")
            reader = SSEReader()
            async for received in response.content.iter_any():
                now = time.perf_counter()
                for data in reader.feed(received):
                    clock.event(data, now)
        if not clock.is_done or not clock.finish_reason:
            raise StreamError("the stream ended early")
        if not clock.arrivals:
            raise StreamError("the stream brought no tokens")
    except (aiohttp.ClientError, TimeoutError, OSError, StreamError) as error:
        return _failure(clock, zero, f"{type(error).__name__}: {error}")
    return clock.outcome(zero)


def _failure(clock: StreamClock, zero: float, error: str) -> Outcome:
    """What is to report of a request that failed now."""
    return Outcome(start=clock.started - zero, e2e=time.perf_counter() - clock.started, error=error)
