"""Which kernels a decode step consists of: the device's time by kernel, and the time in which it did nothing.

    python -m bench.engine.step_profile --shape qwen3-0.6b [--batch 1,64] [--out FILE.json]

The plans of a run are executed again under torch's profiler, several queued at a time, as in `decode_step`. On a CPU
(`--dry`) the profiler sees no kernels, and the tables are empty.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine.decode_step import decode_engine
from bench.engine.offline import fixed, sampling_of
from bench.local_engine import LocalEngine

_NUM_STEPS = 24
_PROFILED = 12


class KernelTime(NamedTuple):
    """One kernel's share of a step."""

    name: str
    launches: float
    """A step."""
    us: float
    """A step."""


class Profile(NamedTuple):
    """A step of `batch` rows, in microseconds."""

    batch: int
    context: int
    step_us: float
    """From the first kernel's begin to the last one's end, over the number of steps."""
    busy_us: float
    kernels: list[KernelTime]


def profile_decode(engine: LocalEngine, vocab_size: int, batch: int, context: int) -> Profile:
    """Profile the last steps of a run in which all rows decode."""
    prompts = [[token % vocab_size for token in prompt] for prompt in fixed(context, batch)[0]]
    run = engine.run(prompts, sampling_of([_NUM_STEPS] * batch))
    profiler = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
    engine.repeat(run.plans, len(run.plans) - _PROFILED, before_timed=profiler.start)
    profiler.stop()
    found = profiler.events() or []
    events = sorted((e.time_range.start, e.time_range.end, e.name) for e in found if e.device_type.name == "CUDA")
    times, launches = Counter[str](), Counter[str]()
    for begin, end, name in events:
        times[_short(name)] += end - begin
        launches[_short(name)] += 1
    kernels = [KernelTime(name, launches[name] / _PROFILED, us / _PROFILED) for name, us in times.most_common()]
    span = max((end for _, end, _ in events), default=0) - min((begin for begin, _, _ in events), default=0)
    return Profile(batch, context, span / _PROFILED, sum(times.values()) / _PROFILED, kernels)


def _short(name: str) -> str:
    """A kernel's name without its template arguments."""
    return re.sub(r"<.*", "", name.removeprefix("void "))[:70]


def main(argv: Sequence[str] | None = None) -> int:
    """Profile one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="a folder name in bench/shapes")
    parser.add_argument("--batch", default="1,64", help="batch sizes, separated by commas")
    parser.add_argument("--dry", action="store_true", help="tiny sizes and shape on the CPU")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    batches = [1, 3] if args.dry else [int(batch) for batch in args.batch.split(",")]
    shape = "tiny" if args.dry else args.shape
    engine, model = decode_engine(shape, max(batches), args.dry)
    profiles = []
    for batch in batches:
        context = 8 if args.dry else 128 if batch == 1 else 1024
        found = profile_decode(engine, model.vocab_size, batch, context)
        profiles.append(found)
        print(f"{shape} B={batch} context {context}: {found.step_us:.0f} us a step, busy {found.busy_us:.0f}")
        for kernel in found.kernels[:25]:
            print(f"  {kernel.us:9.1f} us {kernel.launches:6.1f} x {kernel.us / kernel.launches:7.2f}  {kernel.name}")
    if args.out:
        rows = [{**p._asdict(), "kernels": [k._asdict() for k in p.kernels]} for p in profiles]
        record = {"kind": "profile", "shape": shape, "dry": args.dry, "device": engine.hello.device, "profiles": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
