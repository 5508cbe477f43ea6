"""The soak: minutes or hours of mixed load on one server whose worker is killed again and again.

    python -m tests.soak.drive --minutes 30 --kill-every 120 --out soak.json

Every stream is held against the oracle of the clockwork model. The last line is the verdict; exit code 1 if it is bad.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.servers import Server, serving
from tests.faults.clockwork import make_clockwork
from tests.soak.load import Load
from tests.soak.watch import Watch

FLAGS = ("--served-model-name", "m", "--spare-worker", "--max-num-seqs", "32", "--num-pages", "1024")
MAX_GAP = 5.0  # seconds between two events of a stream
MAX_GROWTH = 4.0  # MiB of a process that was never replaced, over three quarters of the run
MAX_NEW_FDS = 8


async def kill_again_and_again(server: Server, seconds: float) -> None:
    """The worker, while it computes."""
    while True:
        await asyncio.sleep(seconds)
        worker = server.children().get("penstock-worker-0")
        if worker is not None:
            worker.kill()


async def look_again_and_again(watch: Watch, seconds: float) -> None:
    """Take samples."""
    while True:
        watch.look()
        await asyncio.sleep(seconds)


async def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run it; the report."""
    model = make_clockwork(folder / "m", step_seconds=0.004)
    async with serving(model, *FLAGS, PENSTOCK_TEST_MODELS="tests.clockwork.family") as server:
        load, watch = Load(server.url, options.seed, options.clients), Watch(server)
        running = asyncio.create_task(load.run())
        every = max(1.0, options.minutes / 4)
        helpers = [
            asyncio.create_task(kill_again_and_again(server, options.kill_every)),
            asyncio.create_task(look_again_and_again(watch, every)),
        ]
        began = time.monotonic()
        while (left := began + 60 * options.minutes - time.monotonic()) > 0 and not running.done():
            await asyncio.sleep(min(left, 60))
            spent = (time.monotonic() - began) / 60
            print(f"{spent:.1f} min, {load.num_ended.total()} requests, {len(load.violations)} violations", flush=True)
        for helper in helpers:
            helper.cancel()
        load.stop()
        await running
        async with aiohttp.ClientSession() as http:
            metrics = await server.settled(http, 20)
        watch.look()
        deaths = [entry for entry in server.log if entry["event"] == "process exited, restarting"]
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "requests": dict(load.num_ended),
        "violations": load.violations[:50],
        "num_violations": len(load.violations),
        "deaths": len(deaths),
        "longest_gap_seconds": round(load.longest_gap, 2),
        "pages": {name: metrics[f"penstock_num_{name}_pages"] for name in ("free", "cached", "used")}
        | {"all": metrics["penstock_num_pages"]},
        "processes": watch.report(),
    }


def faults_of(report: dict[str, Any]) -> list[str]:
    """What is wrong; empty if nothing is."""
    found = [f"{report['num_violations']} violations"] if report["num_violations"] else []
    pages = report["pages"]
    if pages["used"] or pages["free"] + pages["cached"] != pages["all"]:
        found.append(f"pages {pages}")
    if report["longest_gap_seconds"] > MAX_GAP:
        found.append(f"a gap of {report['longest_gap_seconds']} s")
    for name, figures in report["processes"].items():
        if name in ("penstock-supervisor", "penstock-scheduler", "penstock-frontend-0"):
            if figures["rss_mib_at_end"] - figures["rss_mib"] > MAX_GROWTH:
                found.append(f"{name} grew by {figures['rss_mib_at_end'] - figures['rss_mib']:.1f} MiB")
            if figures["fds_at_end"] - figures["fds"] > MAX_NEW_FDS:
                found.append(f"{name} has {figures['fds_at_end']} descriptors, and had {figures['fds']}")
    return found


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds between two deaths of the worker")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(soak(options, Path(folder)))
    wrong = faults_of(report)
    report["verdict"] = "; ".join(wrong) or "good"
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    total = sum(report["requests"].values())
    print(f"{total} requests, {report['deaths']} deaths, {report['minutes']} min: {report['verdict']} ({options.out})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
