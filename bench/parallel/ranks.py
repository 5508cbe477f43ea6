"""Scheduler time per decode step by the number of ranks: real sockets, workers that answer at once and compute nothing.

    python -m bench.parallel.ranks [--ranks 1,2,8] [--rows 32,256] [--out FILE.json]

The scheduler's loop runs here, as in its process; ranks and a frontend are sockets of one other process. Two figures
per step: CPU time of the loop's thread, and of all threads, which has ZeroMQ's own. Rounds of the cases alternate, and
the fastest of each counts.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
import zmq

from bench.machine import commit, machine
from penstock.config import Config, IpcOptions, SchedulerOptions
from penstock.core.engine.loop import Engine
from penstock.ipc.codec import Codec
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    FrontendHello,
    Message,
    SamplingParams,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerHello,
)
from penstock.ipc.sockets import dealer

_PROMPT = array("i", range(64)).tobytes()
_WARM_UP, _STEPS, _ROUNDS = 200, 1500, 3


class Case(NamedTuple):
    """What is measured."""

    num_ranks: int
    num_rows: int


def play(ipc: IpcOptions, case: Case, done: Connection) -> None:
    """Be all ranks and a frontend, until killed; only the first rank answers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    codec: Codec[ToWorker] = Codec(ToWorker)
    frontend = dealer(context, ipc.frontend_address, "frontend-0")
    ranks = [dealer(context, ipc.worker_address, f"worker-{rank}") for rank in range(case.num_ranks)]

    def send(socket: zmq.Socket[bytes], message: Message) -> None:
        socket.send(codec.encode(message))

    for rank, socket in enumerate(ranks):
        hello = WorkerHello(
            PROTOCOL_VERSION, f"worker-{rank}", rank, "m", "none", "none", 1 << 17, 1 << 14, 16,
            case.num_rows * 1024, case.num_rows, 1 << 16, num_ranks=case.num_ranks, answers=rank == 0,
        )  # fmt: skip
        send(socket, hello)
    send(frontend, FrontendHello(PROTOCOL_VERSION, "frontend-0", "m"))
    sampling = SamplingParams(max_tokens=1 << 13, stop_token_ids=(2,))
    is_begun = False
    poller = zmq.Poller()
    for socket in (frontend, *ranks):
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            frame = socket.recv()
            if socket is not ranks[0]:
                continue
            message = codec.decode(frame)
            if isinstance(message, StepPlan):
                send(socket, StepResult(message.step_id, array("i", [1000] * sum(message.samples)).tobytes()))
            elif not is_begun:  # its welcome: the group is complete
                is_begun = True
                for i in range(case.num_rows):
                    send(frontend, AddRequest(f"r{i:04d}", _PROMPT, sampling))
                done.send(True)


async def measure(case: Case) -> dict[str, float]:
    """Microseconds of CPU time per step."""
    with tempfile.TemporaryDirectory() as folder:
        ipc = IpcOptions(frontend_address=f"ipc://{folder}/f", worker_address=f"ipc://{folder}/w")
        engine = Engine(Config(ipc=ipc, scheduler=SchedulerOptions(max_num_seqs=case.num_rows)))
        ours, theirs = multiprocessing.Pipe()
        player = multiprocessing.get_context("spawn").Process(target=play, args=(ipc, case, theirs), daemon=True)
        player.start()
        try:
            while not ours.poll():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await _steps(engine, _WARM_UP)
            loop_began, all_began = time.thread_time(), time.process_time()
            num_steps = await _steps(engine, _STEPS)
            loop_seconds, all_seconds = time.thread_time() - loop_began, time.process_time() - all_began
        finally:
            player.kill()
            player.join()
            engine.close()
    return {"loop_us": loop_seconds / num_steps * 1e6, "all_us": all_seconds / num_steps * 1e6}


async def _steps(engine: Engine, count: int) -> int:
    """Wait until so many steps have been planned, or a few more; return how many."""

    def planned() -> int:
        scheduler = engine.scheduler
        return 0 if scheduler is None else scheduler.totals.num_steps

    began = planned()
    while planned() - began < count:  # noqa: ASYNC110 (seldom enough to cost nothing)
        await asyncio.sleep(0.02)
    return planned() - began


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--rows", default="32,256")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    ranks, rows = ([int(word) for word in text.split(",")] for text in (args.ranks, args.rows))
    cases = [Case(num_ranks, num_rows) for num_rows in rows for num_ranks in ranks]
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(_ROUNDS):
        for case in cases:
            found[case].append(uvloop.run(measure(case)))
    lines: list[dict[str, Any]] = []
    for case, rounds in found.items():
        best = {name: round(min(each[name] for each in rounds), 1) for name in rounds[0]}
        alone = found[case._replace(num_ranks=ranks[0])]
        times = best["loop_us"] / min(each["loop_us"] for each in alone)
        spread = statistics.pstdev(each["loop_us"] for each in rounds)
        lines.append(case._asdict() | best | {"times": round(times, 2), "spread_us": round(spread, 1)})
        print(
            f"{case.num_rows:4} rows, {case.num_ranks} ranks: {best['loop_us']:7.1f} us in the loop "
            f"({times:.2f} times {ranks[0]} rank), {best['all_us']:7.1f} us in all threads"
        )
    if args.out is not None:
        args.out.write_text(json.dumps({"commit": commit(), "machine": machine(), "steps": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
