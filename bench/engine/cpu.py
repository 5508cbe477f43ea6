"""Decode and prefill on a CPU: Penstock's own kernels beside torch's, taking turns in one run.

    python -m bench.engine.cpu [--model FOLDER | --shape NAME] [--batch 1,4,16] [--threads N] [--out FILE.json]

Weights are random, in the checkpoint's own dtype; `--dtype auto` computes as `penstock serve` would. `step` is the
median time between the results of two decode steps, `of memory` the bytes that the native kernels' step must read
over the rate at which this machine reads memory with the same threads, measured in the same run. Tokens are drawn
without filters, and once more for the largest batch as chat models are set: top-k, top-p and a repetition penalty.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from bench.engine.decode_step import bytes_read, decode_times
from bench.engine.offline import sampling_of
from bench.local_engine import LocalEngine
from bench.machine import command, commit, processor
from bench.shapes_folder import described, shape_folder
from penstock.config.options import CpuKernels
from penstock.gpu_worker.state.kv_pool import page_groups
from penstock.lab.calibration.rates import read_rate
from penstock.models.finding.registry import demo_path

KERNELS: tuple[CpuKernels, ...] = ("native", "torch")


def decode_ms(
    engine: LocalEngine, vocab_size: int, batch: int, context: int, num_steps: int, is_filtered: bool = False
) -> list[float]:
    """Milliseconds of decode steps of the whole batch."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(5, vocab_size, (batch, context)).tolist()
    sampling = sampling_of([num_steps] * batch)
    if is_filtered:
        sampling = [replace(p, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05) for p in sampling]
    run = engine.run(prompts, sampling)
    return [1e3 * seconds for seconds in decode_times(run, batch)]


def prefill_ms(engine: LocalEngine, vocab_size: int, num_tokens: int) -> float:
    """Milliseconds until a prompt has given its first token."""
    prompt = np.random.default_rng(1).integers(5, vocab_size, num_tokens).tolist()
    return 1e3 * engine.run([prompt], sampling_of([1])).seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder (default: the demo model's shape)")
    parser.add_argument("--shape", help="a folder name in bench/shapes, in place of --model")
    parser.add_argument("--batch", default="1,4,16", help="batch sizes, separated by commas")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--steps", type=int, default=50, help="per round")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind of kernels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    folder = shape_folder(args.shape) if args.shape else args.model or demo_path("model")
    model, batches = described(folder), [int(batch) for batch in args.batch.split(",")]
    num_groups = len(page_groups(model, 16))
    engines = {
        kernels: LocalEngine(
            folder,
            device="cpu",
            max_num_seqs=max(batches),
            max_num_batched_tokens=max(args.prefill, 2048),
            max_model_len=max(args.context + args.steps, args.prefill) + 16,
            num_pages=(((max(batches) + 1) * (args.context + args.steps) + args.prefill) // 16 + 100) * num_groups,
            num_threads=args.threads,
            cpu_kernels=kernels,
        )
        for kernels in KERNELS
    }
    rate = read_rate(args.threads)
    rows: list[dict[str, Any]] = []
    for batch, is_filtered in [*((batch, False) for batch in batches), (max(batches), True)]:
        times: dict[str, list[float]] = {kernels: [] for kernels in KERNELS}
        for engine in engines.values():
            decode_ms(engine, model.vocab_size, batch, args.context, 5, is_filtered)  # warm
        for _ in range(args.rounds):
            for kernels, engine in engines.items():
                times[kernels] += decode_ms(engine, model.vocab_size, batch, args.context, args.steps, is_filtered)
        step: dict[str, float] = {kernels: statistics.median(found) for kernels, found in times.items()}
        needed = bytes_read(model, batch, args.context + args.steps / 2)
        of_memory = needed / rate / (step["native"] / 1e3)
        what = f"decode, {batch} rows" + ", filters" * is_filtered
        rows.append({"what": what, "of_memory": of_memory} | step)
    prefills: dict[str, Any] = {
        kernels: min(prefill_ms(engine, model.vocab_size, args.prefill) for _ in range(3))
        for kernels, engine in engines.items()
    }
    rows.append({"what": f"prefill, {args.prefill} tokens"} | prefills)
    hello = next(iter(engines.values())).hello
    print(f"{folder.name} on {hello.device}, {hello.dtype}; {processor()}; memory read at {rate / 1e9:.1f} GB/s")
    print(f"{'':24} {'native, ms':>12} {'torch, ms':>12} {'ratio':>8} {'of memory':>10}")
    for row in rows:
        share = f"{row['of_memory']:.0%}" if "of_memory" in row else ""
        ratio = row["torch"] / row["native"]
        print(f"{row['what']:24} {row['native']:12.2f} {row['torch']:12.2f} {ratio:8.2f} {share:>10}")
    if args.out:
        record = {
            "kind": "cpu",
            "model": folder.name,
            "commit": commit(),
            "machine": processor(),
            "threads": args.threads,
            "command": command("bench.engine.cpu", argv),
        }
        record |= {"dtype": hello.dtype, "read_gb_per_second": rate / 1e9, "rows": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
