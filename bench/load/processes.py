"""Spreads a job over several client processes, for rates that one core cannot make.

`python -m penstock.bench.load.processes` is such a process: a job as JSON on stdin, outcomes as JSON on stdout.
"""

import asyncio
import sys
import time

import msgspec
import uvloop

from penstock.bench.load.client import run_job
from penstock.bench.load.job import Job, Outcome

_START_UP = 1.5
"""Seconds that the processes get to import and read their jobs before the load begins."""


def run(job: Job, num_processes: int) -> list[Outcome]:
    """Run a job in this process, or share it among several; the outcomes in the job's order.

    Raises:
        RuntimeError: if a client process fails.
    """
    if num_processes == 1:
        return uvloop.run(run_job(msgspec.structs.replace(job, start_at=time.time())))
    return asyncio.run(_run_shared(job, num_processes))


async def _run_shared(job: Job, num_processes: int) -> list[Outcome]:
    start_at = time.time() + _START_UP
    shares = [
        msgspec.structs.replace(
            job,
            requests=job.requests[i::num_processes],
            concurrency=_share(job.concurrency, i, num_processes),
            start_at=start_at,
        )
        for i in range(num_processes)
    ]
    results = await asyncio.gather(*(_run_child(share) for share in shares))
    outcomes: list[Outcome | None] = [None] * len(job.requests)
    for i, result in enumerate(results):
        outcomes[i::num_processes] = result
    return [outcome for outcome in outcomes if outcome is not None]


def _share(concurrency: int, index: int, num_processes: int) -> int:
    if not concurrency:
        return 0
    return concurrency // num_processes + (index < concurrency % num_processes)


async def _run_child(job: Job) -> list[Outcome]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock.bench.load.processes",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await child.communicate(msgspec.json.encode(job))
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise RuntimeError(f"a load process ended with code {child.returncode}")
    return msgspec.json.decode(output, type=list[Outcome])


def main() -> None:
    """Read a job, run it, write the outcomes."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run_job(job))))


if __name__ == "__main__":
    main()
