"""The frontend alone: tokens per second of one core, fed by a fake scheduler.

    python -m bench.serving.frontend

Two rows per number of streams. "paced": steps come slowly enough that every token leaves in an event of
its own, the frontend's dearest case; the figure is tokens per second of its CPU time, so what one core
would do. "flood": all steps at once; the frontend merges what piles up, and the figure is by the clock.
The frontend runs on the first core; this process, scheduler and client in one, on the others.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.config import Config, FrontendOptions, IpcOptions, LogOptions, ModelOptions
from penstock.config.parts import with_parts
from penstock.ipc import process
from penstock.ipc.channel import PeerId, Router
from penstock.ipc.codec import Codec, pack_int32
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    EngineReady,
    FromFrontend,
    FrontendHello,
    SequenceDelta,
    TokenBatch,
    TokenColumns,
)

_TEXT = "Water runs down the pipe and turns the wheel; the gate opens slowly, and the river waits behind it. "


@dataclass(frozen=True)
class Case:
    """`num_tokens` per stream; `step_interval` seconds between steps, 0 for all at once."""

    num_streams: int
    num_tokens: int
    step_interval: float


CASES = (
    Case(1, 2000, 0.0005),
    Case(1, 4000, 0.0),
    Case(64, 400, 0.005),
    Case(64, 1000, 0.0),
    Case(512, 80, 0.04),
    Case(512, 400, 0.0),
)


class Client(asyncio.Protocol):
    """One streaming request; counts events and notices the end."""

    def __init__(self, request: bytes, ended: "asyncio.Future[None]") -> None:
        self._request = request
        self._ended = ended
        self._tail = b""
        self.num_events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-64:]
        if b"[DONE]" in self._tail and not self._ended.done():
            self._ended.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_exception(exc or ConnectionResetError("the stream was cut"))


class Feeder:
    """The fake scheduler: one token per stream and step."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, token_ids: list[int]) -> None:
        codec: Codec[FromFrontend] = Codec(with_parts(FromFrontend, "FROM_FRONTEND"))
        self._router: Router[FromFrontend] = Router(context, address, codec, self._on_message)
        self._token_ids = token_ids
        self._requests: list[str] = []
        self._added = asyncio.Semaphore(0)
        self._peer: PeerId = b""
        self.ready = asyncio.Event()

    def _on_message(self, peer: PeerId, message: FromFrontend) -> None:
        if isinstance(message, FrontendHello):
            self._peer = peer
            facts = EngineReady(PROTOCOL_VERSION, message.model_fingerprint, 1 << 20, 1 << 15, 16, 1 << 16, 512)
            self._router.send(peer, facts)
            self.ready.set()
        elif isinstance(message, AddRequest):
            self._requests.append(message.request_id)
            self._added.release()

    async def all_added(self, num_requests: int) -> None:
        """Wait until this many requests have come since the last feed."""
        for _ in range(num_requests):
            await self._added.acquire()

    async def feed(self, case: Case) -> None:
        """Send every step to all streams."""
        began = time.monotonic()
        for step in range(case.num_tokens):
            token = self._token_ids[step % len(self._token_ids)]
            if not self._router.send(self._peer, self._batch(step, token, is_last=step == case.num_tokens - 1)):
                raise RuntimeError("the frontend does not take its messages")
            await asyncio.sleep(max(0.0, began + (step + 1) * case.step_interval - time.monotonic()))
        self._requests.clear()

    def _batch(self, step: int, token: int, *, is_last: bool) -> TokenBatch:
        """As the scheduler makes it: ends in deltas, all else in columns."""
        if is_last:
            return TokenBatch(
                step, tuple(SequenceDelta(request_id, 0, (token,), "length") for request_id in self._requests)
            )
        request_ids = tuple(self._requests)
        return TokenBatch(
            step, (), TokenColumns(request_ids, bytes(4 * len(request_ids)), pack_int32([token] * len(request_ids)))
        )

    def close(self) -> None:
        self._router.close()


async def run_case(case: Case, feeder: Feeder, frontend_pid: int, port: int) -> dict[str, float]:
    """Run one case; tokens per second by the clock and by the frontend's CPU, and microseconds of CPU per token."""
    loop = asyncio.get_running_loop()
    body = json.dumps({"prompt": "Water", "stream": True, "max_tokens": case.num_tokens, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    request = head.encode() + b"\r\n" + body
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(case.num_streams)]
    clients = []
    for ended in ends:
        _, client = await loop.create_connection(lambda ended=ended: Client(request, ended), "127.0.0.1", port)  # type: ignore[misc]
        clients.append(client)
    await feeder.all_added(case.num_streams)
    await asyncio.sleep(1.2)  # the streams' headers have left; from here on it is tokens alone
    cpu_before, began = cpu_seconds(frontend_pid), time.monotonic()
    await asyncio.gather(*ends, feeder.feed(case))
    seconds = time.monotonic() - began
    cpu = cpu_seconds(frontend_pid) - cpu_before
    num_tokens = case.num_streams * case.num_tokens
    return {
        "streams": case.num_streams,
        "tokens": num_tokens,
        "tokens_per_event": num_tokens / sum(client.num_events for client in clients),
        "tokens_per_second": num_tokens / seconds,
        "cpu_share": cpu / seconds,
        "tokens_per_cpu_second": num_tokens / cpu if cpu else float("inf"),
        "cpu_us_per_token": cpu / num_tokens * 1e6,
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's present threads so far, to the nanosecond."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def run(cases: tuple[Case, ...]) -> list[dict[str, float]]:
    """Start a frontend and run the cases."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        token_ids = write_model(folder / "model")
        address = f"ipc://{folder}/frontend.sock"
        config = Config(
            model=ModelOptions(model=str(folder / "model")),
            frontend=FrontendOptions(port=free_port(), shutdown_timeout=0.0),
            ipc=IpcOptions(frontend_address=address, runtime_dir=name, heartbeat_timeout=3600.0),
            log=LogOptions(log_level="warning"),
        )
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        feeder = Feeder(context, address, token_ids)
        config_fd = process.pass_config(config)
        command = [sys.executable, "-m", "penstock.frontend", "--config-fd", str(config_fd)]
        child = await asyncio.create_subprocess_exec(*command, pass_fds=(config_fd,))
        try:
            await asyncio.wait_for(feeder.ready.wait(), 60)
            cores = sorted(os.sched_getaffinity(0))
            if len(cores) > 1:
                os.sched_setaffinity(child.pid, cores[:1])
                os.sched_setaffinity(0, cores[1:])
            await asyncio.sleep(0.5)
            rows = [await run_case(case, feeder, child.pid, config.frontend.port) for case in cases]
        finally:
            child.terminate()
            await child.wait()
            feeder.close()
            context.term()
    return rows


def write_model(folder: Path) -> list[int]:
    """A checkpoint folder with a byte-level tokenizer; the ids of a text to stream."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 0}')
    return tokenizer.encode(_TEXT).ids


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(rows: list[dict[str, float]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| streams | feed | tokens | tokens/event | tokens/s | CPU share | tokens/s of a core | us CPU/token |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row, case in zip(rows, CASES, strict=True):
        lines.append(
            f"| {row['streams']:.0f} | {'paced' if case.step_interval else 'flood'} | {row['tokens']:.0f} "
            f"| {row['tokens_per_event']:.2f} | {row['tokens_per_second']:,.0f} | {row['cpu_share']:.2f} "
            f"| {row['tokens_per_cpu_second']:,.0f} | {row['cpu_us_per_token']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and print; with --json FILE also save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    rows = uvloop.run(run(CASES))
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
