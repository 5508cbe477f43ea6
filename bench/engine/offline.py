"""Offline throughput: many sequences at once through scheduler and runner in one process.

    python -m bench.engine.offline --shape qwen3-0.6b [--workload uniform|1024x1024] [--out FILE.json]

`uniform` is the workload of nano-vllm's and mini-sglang's own benchmark: 256 sequences, prompt and output lengths
uniform from 100 to 1024, seed 0, temperature 0.6, EOS ignored, one warm-up. Weights are random.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.local_engine import LocalEngine, Run
from bench.shapes_folder import shape_folder
from penstock.ipc.messages import SamplingParams

WORKLOADS = ("uniform", "1024x1024")
NUM_SEQUENCES = 256
_TEMPERATURE = 0.6
_MOST_ID = 10000


def uniform(num_seqs: int = NUM_SEQUENCES, least: int = 100, most: int = 1024) -> tuple[list[list[int]], list[int]]:
    """(prompts, output lengths), drawn in the order in which nano-vllm's bench.py draws them from seed 0."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, _MOST_ID) for _ in range(rng.randint(least, most))] for _ in range(num_seqs)]
    return prompts, [rng.randint(least, most) for _ in range(num_seqs)]


def fixed(length: int, num_seqs: int = NUM_SEQUENCES) -> tuple[list[list[int]], list[int]]:
    """(prompts, output lengths), all of one length."""
    rng = random.Random(0)
    return [[rng.randint(0, _MOST_ID) for _ in range(length)] for _ in range(num_seqs)], [length] * num_seqs


def sampling_of(output_lens: Sequence[int]) -> list[SamplingParams]:
    """No stop ids: EOS is ignored."""
    return [SamplingParams(max_tokens=n, temperature=_TEMPERATURE, seed=i) for i, n in enumerate(output_lens)]


def figures(run: Run, num_prompt_tokens: int) -> dict[str, float]:
    """What the table shows."""
    device = sum(step.device_us for step in run.steps) / 1e6
    return {
        "seconds": run.seconds,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": run.num_output_tokens,
        "output_tokens_per_s": run.num_output_tokens / run.seconds,
        "num_steps": len(run.steps),
        "device_share": device / run.seconds,
        "idle_us_per_step": sum(step.idle_us for step in run.steps[1:]) / max(1, len(run.steps) - 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run one workload on one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="a folder name in bench/shapes")
    parser.add_argument("--workload", choices=WORKLOADS, default="uniform")
    parser.add_argument("--dry", action="store_true", help="a tiny workload and shape on the CPU")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of `penstock serve`")
    parser.add_argument("--quantization", default="", help="as of `penstock serve`")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of LLM(), again and again")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    if args.dry:
        prompts, lens = uniform(4, 3, 12) if args.workload == "uniform" else fixed(8, 4)
        prompts = [[token % 500 for token in prompt] for prompt in prompts]
    else:
        prompts, lens = uniform() if args.workload == "uniform" else fixed(1024)
    shape = "tiny" if args.dry else args.shape
    more: dict[str, Any] = dict(option.split("=", 1) for option in args.option)
    engine = LocalEngine(
        shape_folder(shape),
        device="cpu" if args.dry else "cuda",
        max_num_seqs=len(prompts),
        max_num_batched_tokens=64 if args.dry else 16384,
        max_model_len=128 if args.dry else 4096,
        num_pages=64 if args.dry else 0,
        enforce_eager=args.enforce_eager,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        **{name: json.loads(value) for name, value in more.items()},
    )
    engine.run([[1, 2, 3]], sampling_of([2]))  # the warm-up
    run = engine.run(prompts, sampling_of(lens))
    found = figures(run, sum(map(len, prompts)))
    record = {
        "kind": "offline",
        "shape": shape,
        "workload": args.workload,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
        "options": args.option,
        "dry": args.dry,
        "device": engine.hello.device,
        "start_seconds": engine.start_seconds,
        "figures": found,
    }
    rate, seconds = found["output_tokens_per_s"], found["seconds"]
    print(f"offline {shape} {args.workload}: {rate:.0f} output tokens/s, {seconds:.1f} s, {len(run.steps)} steps")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
