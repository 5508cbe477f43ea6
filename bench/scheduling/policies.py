"""Each scheduling policy on the load that it is made for, beside fcfs: on a real server, and in the simulator.

    python -m bench.scheduling.policies --out FOLDER

Serves the demo model over HTTP with a server of its own for each run. A scenario's first run has all requests come at
once: it says what rate the server can do, of which the others have a multiple, and its step trace is what the
simulator's step costs are fitted to. What a policy claims is a ratio between runs with the same arrivals.
Writes policies.json and, with the extra `bench`, policies.svg.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.machine import commit, machine
from bench.scheduling.policy_scenarios import FLOOD, LIGHT, SCENARIOS, Run, Scenario, Served
from bench.server_process import free_port, running
from penstock.bench.load.job import Job, PlannedRequest
from penstock.bench.load.processes import run as run_load
from penstock.config import Config
from penstock.config.options import SchedulerOptions
from penstock.lab.simulation.arrivals import Arrival
from penstock.lab.simulation.prompts import Prompts
from penstock.lab.simulation.simulator import Simulator
from penstock.lab.simulation.study import Load, Machine, measured
from penstock.models.finding.registry import demo_path
from penstock.parts.policies.scheduler.registry import POLICIES

_LONGEST = 2048
_VOCABULARY, _FIRST_ID = 4096, 16
_OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "queue_patience": 0.0}
_NUM_PAGES = 8 * _LONGEST // 16
_KEYS = {LIGHT: "sk-light-0123456789abcdef", FLOOD: "sk-flood-0123456789abcdef"}
_WARM_UP = 24
_CURVE_POINTS = 60
_POLICY_OF = {"alone": "fair"}
_COLORS = {"fcfs": "#999999", "alone": "#4d8c3a"}


@contextmanager
def server(folder: Path, policy: str, flags: Sequence[str], trace: Path | None = None) -> Iterator[str]:
    """A server of the demo model under a policy; its address."""
    keys = folder / "keys.toml"
    keys.write_text(
        "".join(
            f'[[keys]]\nid = "{id_}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n' for id_, key in _KEYS.items()
        )
    )
    port = free_port()
    options = {"num_pages": _NUM_PAGES, **_OPTIONS, "scheduling_policy": policy, "num_threads": 1}
    command = [sys.executable, "-m", "penstock.cli", "serve", str(demo_path("model")), "--port", str(port)]
    for name, value in options.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    command += [*flags, "--api-keys-file", str(keys), "--served-model-name", "m"]
    command += ["--step-trace", str(trace)] if trace else []
    environment = os.environ | {"PENSTOCK_LOG_LEVEL": "warning"}
    with running(command, f"http://127.0.0.1:{port}/ready", environment, 120, folder / "server.log"):
        yield f"http://127.0.0.1:{port}/v1"


def serve(url: str, arrivals: Sequence[Arrival], seed: int) -> list[Served]:
    """Send it all, each request at its time."""
    prompts = Prompts(_VOCABULARY - _FIRST_ID, 16, _LONGEST, seed)
    requests = []
    for arrival in arrivals:
        ids = np.frombuffer(prompts.make(arrival), dtype=np.int32) + _FIRST_ID
        more: dict[str, int | float | str] = {}
        if arrival.priority:
            more["priority"] = arrival.priority
        if arrival.ttft_ms:
            more["slo_ttft_ms"] = arrival.ttft_ms
        key = _KEYS[arrival.key or FLOOD]
        requests.append(PlannedRequest(arrival.time, ids.tolist(), arrival.output_len, more, key))
    outcomes = run_load(Job(url, "m", "completions", requests, 0, time.time()), 1)
    return [
        Served(arrival, each.ttft, each.e2e, each.num_cached_tokens, each.error)
        for arrival, each in zip(arrivals, outcomes, strict=True)
    ]


def warm_up(seed: int) -> list[Arrival]:
    """Requests of all kinds of lengths, for what a server does once and what a policy must have seen."""
    rng = random.Random(seed)
    return [
        Arrival(time=0.05 * i, input_len=rng.choice((32, 128, 400, 800, 1536)), output_len=rng.choice((2, 8, 32)))
        for i in range(_WARM_UP)
    ]


def simulate(model: Machine, policy: str, arrivals: Sequence[Arrival], flags: Sequence[str], seed: int) -> list[Served]:
    """The same in virtual time, after the same warm-up."""
    early = warm_up(seed + 1)
    begins = 4.0
    both = [*early, *(msgspec.structs.replace(each, time=each.time + begins) for each in arrivals)]
    num_pages = int(flags[flags.index("--num-pages") + 1]) if "--num-pages" in flags else _NUM_PAGES
    options = SchedulerOptions(**_OPTIONS, scheduling_policy=policy)
    hello = model.hello(Config(scheduler=options))
    hello = msgspec.structs.replace(hello, num_pages=num_pages)
    requests = Load(both, seed=seed).requests(model)
    run = Simulator(options, hello, model.device, model.timing, both, requests, seed=seed).run()
    return [
        Served(arrival, 0.0 if o.error else o.ttft, 0.0 if o.error else o.e2e, o.num_cached, o.error)
        for arrival, o in zip(both, run.outcomes, strict=True)
    ][len(early) :]


def measure(scenario: Scenario, folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """One scenario's runs, on the server and in the simulator; figures and ratios."""
    trace = folder / f"{scenario.policy}-{scenario.baseline}.jsonl"

    def capacity(arrivals: Sequence[Arrival]) -> float:
        with server(folder, "fcfs", scenario.flags, trace) as url:
            serve(url, warm_up(seed + 1), seed + 1)
            served = serve(url, arrivals, seed + 2)
        if failed := [each.error for each in served if each.error]:
            raise RuntimeError(f"a request of the first run failed: {failed[0]}")
        return len(served) / max(each.e2e for each in served)

    runs = scenario.make(random.Random(seed), capacity, seconds)
    # What steps cost is fitted to the run of a moment ago: that of another hour would be of another machine.
    model = measured(trace).machine._replace(max_model_len=_LONGEST, vocab_size=_VOCABULARY - _FIRST_ID)
    found: dict[str, Any] = {"policy": scenario.policy, "claim": scenario.claim, "target": scenario.target,
                             "baseline": scenario.baseline, "num_requests": len(runs[-1].arrivals)}  # fmt: skip
    for where in ("measured", "simulated"):
        each = {run.policy: _one(scenario, run, model if where == "simulated" else None, folder, seed) for run in runs}
        figures = {policy: scenario.figure(served) for policy, served in each.items()}
        found[where] = {
            "figures": figures,
            "ratio": scenario.ratio(figures[scenario.baseline], figures[scenario.policy]),
            "failed": {policy: sum(bool(one.error) for one in served) for policy, served in each.items()},
            "ttft_s": {policy: curve(served, "ttft") for policy, served in each.items()},
            "e2e_s": {policy: curve(served, "e2e") for policy, served in each.items()},
        }
    return found


def curve(served: Sequence[Served], name: str) -> list[tuple[float, float]]:
    """(share of requests, seconds within which they were answered), at some shares."""
    times = sorted(getattr(each, name) for each in served if not each.error)
    places = sorted({i * (len(times) - 1) // (_CURVE_POINTS - 1) for i in range(_CURVE_POINTS)}) if times else []
    return [(round((i + 1) / len(served), 4), round(times[i], 5)) for i in places]


def _one(scenario: Scenario, run: Run, model: Machine | None, folder: Path, seed: int) -> list[Served]:
    policy = _POLICY_OF.get(run.policy, run.policy)
    if model is not None:
        return simulate(model, policy, run.arrivals, scenario.flags, seed)
    with server(folder, policy, scenario.flags) as url:
        serve(url, warm_up(seed + 1), seed + 1)
        return serve(url, run.arrivals, seed)


def draw(record: dict[str, Any], target: Path) -> None:
    """A panel for each scenario: how long its requests took, under each policy, on the server and simulated."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scenarios = record["scenarios"]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        figure = Figure(figsize=(11, 3.2 * ((len(scenarios) + 1) // 2)), layout="constrained")
        panels = figure.subplots((len(scenarios) + 1) // 2, 2).flatten()
        for axes, found in zip(panels, scenarios, strict=False):
            shows_latency = "latency" in found["claim"]
            for where, line in (("measured", "-"), ("simulated", "--")):
                for policy, points in found[where]["e2e_s" if shows_latency else "ttft_s"].items():
                    share, seconds = [share for share, _ in points], [time for _, time in points]
                    label = policy if where == "measured" else None
                    axes.plot(seconds, share, line, color=_COLORS.get(policy, "#0b6e99"), label=label)
            ratios = " / ".join(f"{found[where]['ratio']:.2f}" for where in ("measured", "simulated"))
            axes.set_title(f"{found['policy']}: {found['claim']}\nratio measured / simulated: {ratios}", fontsize=8)
            axes.set_xlabel("seconds until the end" if shows_latency else "seconds to the first token", fontsize=8)
            axes.set_ylabel("share of requests", fontsize=8)
            axes.set_xscale("log")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
        for axes in panels[len(scenarios) :]:
            axes.set_axis_off()
        figure.savefig(target, format="svg", metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Run all scenarios; returns the exit code (1: a measured claim does not hold)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="policies, separated by commas")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long requests come in each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/policies"), help="folder for the results")
    args = parser.parse_args(argv)
    chosen = args.only.split(",") if args.only else list(POLICIES)
    record: dict[str, Any] = {"kind": "policies", "commit": commit(), "machine": machine(),
                              "seconds": args.seconds, "scenarios": []}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for scenario in SCENARIOS:
            if scenario.policy in chosen and scenario.policy in POLICIES:
                found = measure(scenario, folder, args.seconds, args.seed)
                record["scenarios"].append(found)
                print(_sentence(found), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "policies.json").write_text(json.dumps(record) + "\n")
    try:
        draw(record, args.out / "policies.svg")
    except ImportError:
        print("no plot: it needs matplotlib, which the extra `bench` brings", file=sys.stderr)
    return int(any(found["measured"]["ratio"] < found["target"] for found in record["scenarios"]))


def _sentence(found: dict[str, Any]) -> str:
    lines = [f"{found['policy']}: {found['claim']} ({found['num_requests']} requests)"]
    for where in ("measured", "simulated"):
        its = found[where]
        figures = ", ".join(f"{policy} {figure:.3f}" for policy, figure in its["figures"].items())
        lines.append(f"  {where}: {figures}; ratio {its['ratio']:.2f} (target {found['target']:.2f})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
