"""How far simulations are off: a server is measured under some loads, and simulated by a fit to another one.

    python -m bench.serving.simulation [--model demo | --model qwen2.5-0.5b | --model clockwork] [--out FILE]
    python -m bench.serving.simulation --speed

Each load gets a server of its own, which records what it does. The loads are served in turns of some seconds, so that
a machine whose pace changes is as quick for the one as for the other. Step costs, and the way between clients and
scheduler, are fitted to the recording of the first load alone; the others are simulated from what their clients sent
and when, and printed beside what these clients measured. Run it on a quiet machine: a load that had the processor to
itself is no guide to one that had to share it. Where the last column, of a fit to the load itself, is small and the
error is not, the machine was not the same for both. `clockwork` is a model whose steps sleep, and need no processor.
`--speed` says how many requests a minute are simulated, and by which load.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench.machine import commit, machine
from bench.server_process import free_port, running
from bench.shapes_folder import servable_folder, shape_folder
from penstock.bench.load.client import run_job
from penstock.bench.load.job import Job, Outcome, PlannedRequest
from penstock.bench.load.report import summarize
from penstock.config import Config, SchedulerOptions
from penstock.config.flags import config_from
from penstock.config.parser import Parser
from penstock.lab.commands.plan import read_decoder
from penstock.lab.planning.costs import Costs
from penstock.lab.planning.machines import load_machines
from penstock.lab.planning.plan import Plan
from penstock.lab.simulation.arrivals import Arrival, Bursts, Shape, Targets, draw
from penstock.lab.simulation.figures import figures
from penstock.lab.simulation.fit import FittedDevice
from penstock.lab.simulation.prompts import Prompts
from penstock.lab.simulation.recordings import Delays
from penstock.lab.simulation.simulator import Simulator
from penstock.lab.simulation.study import Load, Machine, Measured, measured, planned_machine, with_clients
from penstock.models.families.registry import TEST_MODELS_VARIABLE
from tests.faults.clockwork import make_clockwork

_NUM_WARM = 6
_PAUSE = 0.5  # seconds between turns
_NUM_RUNS = 10
"""Simulations of a load, whose figures are averaged: they differ in which steps are slow."""

_IN_USE = "tokens_per_s_in_use"
_FIGURES = (
    ("TTFT p50, ms", "ttft_ms", "p50"),
    ("TTFT p99, ms", "ttft_ms", "p99"),
    ("TPOT p50, ms", "tpot_ms", "p50"),
    ("TPOT p99, ms", "tpot_ms", "p99"),
    ("output tokens/s in use", _IN_USE, ""),
)


class Workload(NamedTuple):
    """A load of so many requests."""

    name: str
    num_requests: int
    turn: int  # requests of one turn
    bursts: Bursts
    shape: Shape


def workloads(model: str) -> list[Workload]:
    """The one that is fitted to, then those that are predicted."""
    rate, count, turn, prompt, answer = {
        "demo": (12.0, 1200, 25, (20, 300), (10, 100)),
        "qwen2.5-0.5b": (0.8, 120, 12, (20, 140), (16, 64)),
        "clockwork": (8.0, 300, 25, (20, 300), (10, 60)),
    }[model]
    plain = Shape(input_len=prompt, output_len=answer)
    prefix_len = prompt[1] * 2 // 3 // 16 * 16
    shared = Shape(
        input_len=(prefix_len + 8, prefix_len + prompt[1] // 2),
        output_len=answer,
        prefix_len=prefix_len,
        num_prefixes=4,
    )
    return [
        Workload("fitted", count, turn, Bursts(rate=rate, burstiness=0.5), plain),
        Workload("steady", count, turn, Bursts(rate=rate), plain),
        Workload("bursty", count, turn, Bursts(rate=0.75 * rate, burstiness=0.2), plain),
        Workload("shared prefixes", count, turn, Bursts(rate=1.2 * rate), shared),
    ]


class Served(NamedTuple):
    """A load that a server was under."""

    outcomes: list[Outcome]
    arrivals: list[Arrival]  # as they were sent
    known: Measured


def serve_command(model: str, folder: Path) -> list[str]:
    """What starts a server of the model, which may have to be made first in a folder of this one."""
    command = [sys.executable, "-m", "penstock.cli", "serve"]
    if model == "clockwork":
        # All of the memory would be millions of pages, whose lists Python's garbage collector scans for 0.1 s.
        command += [str(make_clockwork(folder / "model", step_seconds=0.01)), "--num-pages", "16384"]
    elif model != "demo":
        command += [str(servable_folder(model, folder / "model")), "--load-format", "dummy"]
    return [*command, "--served-model-name", "m", "--num-threads", "1"]


class Server:
    """One that records what it does, and the load that it is under."""

    def __init__(self, model: str, workload: Workload, seed: int, folder: Path, flags: Sequence[str]) -> None:
        self._name, port = workload.name.replace(" ", "-"), free_port()
        self._url, self._folder = f"http://127.0.0.1:{port}", folder
        self._record = folder / f"{self._name}.jsonl"
        self._command = [*serve_command(model, folder), "--port", str(port), "--record", str(self._record), *flags]
        self._drawn = draw(workload.num_requests, workload.bursts, workload.shape, seed)
        prompts = Prompts(200, 16, max(each.input_len for each in self._drawn), seed)  # bytes, for each tokenizer
        self._planned = [
            PlannedRequest(
                each.time, (50 + np.frombuffer(prompts.make(each), dtype=np.int32)).tolist(), each.output_len
            )
            for each in self._drawn
        ]
        self._turn = workload.turn
        self.num_turns = -(-workload.num_requests // workload.turn)
        self._outcomes: list[Outcome] = []
        self._began = 0.0  # its first turn, on the clock

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started, and warm."""
        environment = os.environ | {"PENSTOCK_LOG_LEVEL": "warning", TEST_MODELS_VARIABLE: "tests.clockwork.family"}
        log = self._folder / f"{self._name}.log"
        with running(self._command, f"{self._url}/ready", environment, 300, log):
            self._ask([PlannedRequest(0.0, [7 + i] * 40, 8) for i in range(_NUM_WARM)], 1, time.time())
            yield

    def turn(self, number: int) -> None:
        """Serve one of the parts of its load."""
        part = self._planned[number * self._turn : (number + 1) * self._turn]
        start = time.time() + _PAUSE
        self._began = self._began or start
        requests = [msgspec.structs.replace(each, arrival=each.arrival - part[0].arrival) for each in part]
        for outcome in self._ask(requests, 0, start):
            if outcome.error:
                raise RuntimeError(f"{self._name}: a request failed: {outcome.error}")
            self._outcomes.append(msgspec.structs.replace(outcome, start=outcome.start + start - self._began))

    def _ask(self, requests: list[PlannedRequest], concurrency: int, start: float) -> list[Outcome]:
        return uvloop.run(run_job(Job(f"{self._url}/v1", "m", "completions", requests, concurrency, start)))

    def served(self) -> Served:
        """All of it, from its clients and its recording; without turns, those of an earlier run."""
        clients = self._folder / f"{self._name}-clients.json"
        if self._outcomes:
            clients.write_bytes(msgspec.json.encode(self._outcomes))
        else:
            self._outcomes = msgspec.json.decode(clients.read_bytes(), type=list[Outcome])
        known = measured(self._record)
        known = known._replace(arrivals=known.arrivals[_NUM_WARM:], delays=known.delays[_NUM_WARM:])
        sent = [
            msgspec.structs.replace(each, time=max(0.0, outcome.start))
            for each, outcome in zip(self._drawn, self._outcomes, strict=True)
        ]
        return Served(self._outcomes, sent, known)


def serve(model: str, seed: int, folder: Path, flags: Sequence[str], is_kept: bool) -> list[Served]:
    """Serve all loads in turns, unless their recordings are in the folder."""
    servers = [Server(model, each, seed + number, folder, flags) for number, each in enumerate(workloads(model))]
    if is_kept:
        return [server.served() for server in servers]
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.running())
        for number in range(max(server.num_turns for server in servers)):
            for server in servers:
                server.turn(number)
    return [server.served() for server in servers]


def fitted(served: Served) -> Machine:
    """The machine, by what its scheduler recorded and its clients saw of one load."""
    seen = sorted(served.outcomes, key=lambda outcome: outcome.start)
    lengths = [each.output_len for each in served.known.arrivals]
    if len(lengths) != len(seen):
        raise RuntimeError(f"{len(seen)} requests were sent, and {len(lengths)} are in the recording")
    at_clients = [Delays(each.ttft, each.e2e) for each in seen]
    return with_clients(served.known, [each.start for each in seen], at_clients)


def rate_in_use(requests: Iterable[tuple[float, float, int]]) -> float:
    """Output tokens per second of the time in which there was a request at all.

    Args:
        requests: when each was sent and had ended, and how many tokens it was answered with.
    """
    num_tokens, seconds, until = 0, 0.0, 0.0
    for sent, ended, count in sorted(requests):
        num_tokens += count
        seconds += max(0.0, ended - max(sent, until))
        until = max(until, ended)
    return num_tokens / seconds


def simulated(on: Machine, arrivals: Sequence[Arrival], config: Config) -> dict[str, Any]:
    """Each figure's mean over some simulations."""
    load = Load(sorted(arrivals, key=lambda each: each.time))
    requests = load.requests(on)
    found: dict[str, list[float]] = {}
    for seed in range(_NUM_RUNS):
        one = Simulator(config, on.hello(config), on.device, on.timing, load.arrivals, requests, seed=seed)
        done = one.run()
        run = figures(done, load.arrivals, 0, Targets())
        run[_IN_USE] = rate_in_use((each.sent, each.ended, each.num_tokens) for each in done.outcomes)
        for title, figure, share in _FIGURES:
            found.setdefault(title, []).append(run[figure][share] if share else run[figure])
    return {title: statistics.mean(values) for title, values in found.items()}


def judge(model: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Serve all loads, and compare those that nothing was fitted to."""
    flags, keep = args.flags.split(), args.kept or args.keep
    parser = Parser("--flags", "")
    parser.add_flags(("scheduler",))
    config = config_from(parser.parse_args(flags), {})
    record: dict[str, Any] = {"model": model, "loads": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep / model if keep is not None else Path(temporary)
        if args.kept is None:
            folder.mkdir(parents=True, exist_ok=True)
        first, *others = serve(model, args.seed, folder, flags, args.kept is not None)
        on = fitted(first)
        assert isinstance(on.device, FittedDevice)
        record["weights"], record["typical_error"] = on.device.weights, on.device.error
        record["timing"] = msgspec.to_builtins(on.timing)
        for workload, served in zip(workloads(model)[1:], others, strict=True):
            summary, predicted = summarize(served.outcomes), simulated(on, served.arrivals, config)
            summary[_IN_USE] = rate_in_use(
                (each.start, each.start + each.e2e, each.num_output_tokens) for each in served.outcomes
            )
            own = simulated(fitted(served), served.arrivals, config)
            table = Table(f"{model}: {workload.name}", "predicted", "measured", "error", "own fit's error", box=None)
            found = record["loads"][workload.name] = {}
            for title, figure, share in _FIGURES:
                actual = summary[figure][share] if share else summary[figure]
                error, own_error = predicted[title] / actual - 1, own[title] / actual - 1
                found[title] = {
                    "predicted": predicted[title],
                    "measured": actual,
                    "error": error,
                    "own_fit_error": own_error,
                }
                table.add_row(title, f"{predicted[title]:.2f}", f"{actual:.2f}", f"{error:+.1%}", f"{own_error:+.1%}")
            console.print(table)
    record["largest_error"] = max(abs(each["error"]) for load in record["loads"].values() for each in load.values())
    console.print(f"{model}: the largest error is {record['largest_error']:.1%}\n")
    return record


def speed(count: int, rate: float) -> dict[str, Any]:
    """Requests a minute of processor time, for Llama 3.1 8B on an H100 under a load that fills most rows."""
    decoder = read_decoder(str(shape_folder("llama-3.1-8b")))
    on = planned_machine(Plan(Costs(decoder), load_machines()["h100"]), 0.7)
    config = Config(scheduler=SchedulerOptions())
    began = time.process_time()
    shape = Shape(input_len=(64, 1024), output_len=(16, 240), prefix_len=48, num_prefixes=16)
    load = Load(draw(count, Bursts(rate=rate), shape, 0))
    requests = load.requests(on)
    one = Simulator(config, on.hello(config), on.device, on.timing, load.arrivals, requests)
    found = figures(one.run(), load.arrivals, 0, Targets())
    seconds = time.process_time() - began
    return {
        "requests": count,
        "rate_per_s": rate,
        "rows_on_average": round(found["num_output_tokens"] / found["num_steps"], 1),
        "steps": found["num_steps"],
        "output_tokens": found["num_output_tokens"],
        "processor_s": round(seconds, 3),
        "us_per_step": round(1e6 * seconds / found["num_steps"], 1),
        "requests_per_minute": round(60 * count / seconds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", choices=("demo", "qwen2.5-0.5b", "clockwork"), help="can be repeated")
    add("--seed", type=int, default=1)
    add("--flags", default="--queue-patience 0", help="options of the server's scheduler (default: %(default)s)")
    add("--speed", action="store_true", help="measure how fast simulations are, and nothing else")
    recordings = parser.add_mutually_exclusive_group()
    recordings.add_argument("--keep", type=Path, metavar="FOLDER", help="for recordings, which are dropped otherwise")
    recordings.add_argument(
        "--kept", type=Path, metavar="FOLDER", help="simulate recordings that --keep left there; serve nothing"
    )
    add("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    record: dict[str, Any] = {"kind": "simulation", "commit": commit(), "machine": machine()}
    if args.speed:
        record["speed"] = [speed(20_000, rate) for rate in (10.0, 25.0)]
        for each in record["speed"]:
            console.print(each)
    else:
        models = args.model or ["demo", "qwen2.5-0.5b"]
        record["models"] = [judge(model, args, console) for model in models]
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
