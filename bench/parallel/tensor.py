"""Tensor ranks with one thread each beside one worker with as many threads, taking turns in one run.

    python -m bench.parallel.tensor [--shape NAME] [--ranks 2] [--experts] [--batch 1,16] [--out FILE.json]

All are processes of their own, which compute the same recorded plans, several queued at a time; a step of ranks takes
as long as the slowest one's. Weights are random, in the checkpoint's own dtype. A ratio is the worker's time by the
ranks' in the same round: 1 is as fast, and what splitting the work costs is missing from it. With `--experts` each
expert is split over the ranks in one group, and whole experts are spread over them in another one: tokens of random
weights spread evenly over experts.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from bench.engine.offline import sampling_of
from bench.local_engine import LocalEngine, repeat
from bench.machine import commit, machine
from bench.shapes_folder import described, shape_folder
from penstock.config import Config
from penstock.config.ranks import Rank
from penstock.gpu_worker.startup.start import start
from penstock.ipc.messages import StepPlan
from penstock.options import config_of

Options = dict[str, Any]
Plans = tuple[list[StepPlan], int]  # and how many of them are not timed
_ONE = "one worker"


def record(folder: Path, options: Options, batches: Sequence[int], args: argparse.Namespace) -> dict[str, Plans]:
    """The plans of each measurement."""
    engine, rng = LocalEngine(folder, **options), np.random.default_rng(0)
    vocab_size = described(folder).vocab_size
    found: dict[str, Plans] = {}
    for batch in batches:
        prompts = rng.integers(5, vocab_size, (batch, args.context)).tolist()
        run = engine.run(prompts, sampling_of([args.steps] * batch))
        first = next(i for i, step in enumerate(run.steps) if step.num_rows == step.num_tokens == batch)
        found[f"decode, {batch} rows"] = run.plans, first
    prompt = rng.integers(5, vocab_size, args.prefill).tolist()
    found[f"prefill, {args.prefill} tokens"] = engine.run([prompt], sampling_of([1])).plans, 0
    return found


def compute(channel: Connection, config: Config, rank: Rank) -> None:
    """A process: starts a worker, then computes plans as often as it is told to, and says how long a step took."""
    runner = start(config, rank).runner
    channel.send(None)
    while (plans := channel.recv()) is not None:
        channel.send(repeat(runner, *plans)[0])


class Workers:
    """The workers of one group, which meet in `folder`."""

    def __init__(self, options: Options, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        config = config_of(options, {})
        config = replace(config, ipc=replace(config.ipc, rendezvous_address=f"file://{folder}/ranks"))
        num_ranks = config.parallel.tensor_parallel_size
        folder.mkdir()
        self._channels: list[Connection] = []
        for number in range(num_ranks):
            ours, theirs = context.Pipe()
            args = (theirs, config, Rank(number, num_ranks))
            context.Process(target=compute, args=args, daemon=True).start()
            self._channels.append(ours)
        for channel in self._channels:
            channel.recv()

    def seconds(self, plans: Plans) -> float:
        """Of a step of these plans."""
        for channel in self._channels:
            channel.send(plans)
        return max(float(channel.recv()) for channel in self._channels)

    def close(self) -> None:
        """End the processes."""
        for channel in self._channels:
            channel.send(None)


def ways_of(common: Options, args: argparse.Namespace) -> dict[str, Options]:
    """The options of each group; the first one is a worker alone."""
    split = common | {"num_threads": 1, "tensor_parallel_size": args.ranks}
    ways = {_ONE: common, "split": split}
    if args.experts:
        ways["spread"] = split | {"enable_expert_parallel": True}
        if args.kernels == "torch":
            ways["spread, all-to-all"] = ways["spread"] | {"expert_exchange": "all-to-all"}
    return ways


def measure(ways: dict[str, Options], plans: dict[str, Plans], num_rounds: int) -> list[dict[str, Any]]:
    """For each measurement and group the milliseconds of a step in each round, and the median of its ratios."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as meeting:
        groups = {way: Workers(options, Path(meeting, str(i))) for i, (way, options) in enumerate(ways.items())}
        for what, its_plans in plans.items():
            for group in groups.values():
                group.seconds(its_plans)  # warms up
            rounds = [{way: 1e3 * group.seconds(its_plans) for way, group in groups.items()} for _ in range(num_rounds)]
            for way in ways:
                ratios = [times[_ONE] / times[way] for times in rounds]
                row = {"what": what, "way": way, "ms": [times[way] for times in rounds]}
                rows.append(row | {"ratio": statistics.median(ratios), "ratios": ratios})
        for group in groups.values():
            group.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="a folder name in bench/shapes")
    parser.add_argument("--dtype", default="auto", help="as of `penstock serve`")
    parser.add_argument("--kernels", default="native", choices=("native", "torch"))
    parser.add_argument("--ranks", type=int, default=2, help="and threads of the one worker")
    parser.add_argument("--experts", action="store_true", help="spread experts, too; the shape must have some")
    parser.add_argument("--batch", default="1,16", help="batch sizes, separated by commas")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--steps", type=int, default=50, help="per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    batches, folder = [int(batch) for batch in args.batch.split(",")], shape_folder(args.shape)
    options: Options = {
        "device": "cpu",
        "cpu_kernels": args.kernels,
        "dtype": args.dtype,
        "load_format": "dummy",
        "enable_prefix_caching": False,
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": max(args.prefill, 2048),
        "max_model_len": max(args.context + args.steps, args.prefill) + 16,
        "num_pages": ((max(batches) + 1) * (args.context + args.steps) + args.prefill) // 16 + 100,
        "num_threads": args.ranks,
    }
    about_machine = machine()
    rows = measure(ways_of(options | {"model": str(folder)}, args), record(folder, options, batches, args), args.rounds)
    print(f"{args.shape}, {args.dtype}, {args.kernels} kernels; {args.ranks} threads, or ranks with one each")
    print(f"{'':24} {'':20} {'ms a step':>10} {'ratio':>8} {'of rounds':>14}")
    for row in rows:
        of_rounds = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
        print(
            f"{row['what']:24} {row['way']:20} {statistics.median(row['ms']):10.2f} {row['ratio']:8.2f} {of_rounds:>14}"
        )
    if args.out:
        command = shlex.join(["python", "-m", "bench.parallel.tensor", *(argv if argv is not None else sys.argv[1:])])
        about = {"kind": "tensor", "command": command, "commit": commit(), "machine": about_machine}
        args.out.write_text(json.dumps(about | {"load_after": os.getloadavg()[0], "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
