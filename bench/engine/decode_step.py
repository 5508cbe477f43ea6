"""Decode steps of B rows: how long one takes, and how much of that the device waits for the host.

    python -m bench.engine.decode_step --shape llama-3.1-8b [--batch 1,256] [--out FILE.json]

Three figures per batch. `step`: between the results of two decode steps, through scheduler and runner at pipeline
depth 1. `queued`: the plans of these steps, and of no others, executed again with several of them queued, so that the
device waits for nobody.
`exposed`: the difference, which is host time that the device had to wait for. Weights are random.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.engine.offline import fixed, sampling_of
from bench.local_engine import LocalEngine, Run
from bench.shapes_folder import described, shape_folder
from penstock.models.description.model_config import ModelConfig

_NUM_STEPS = 100
_PLAIN: Mapping[str, float] = {}
_WEIGHT_BITS = {"int8": 8, "int8_weight_only": 8, "fp8": 8, "int4": 5}  # int4: with scales, and a head in 8 bits
_KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "int4": 0.6}
_CONTEXT = {1: 128, 256: 1024}
"""Prompt length by batch: one row shows the weights' floor, many rows show the KV's."""


def decode_times(run: Run, batch: int) -> list[float]:
    """Seconds from result to result of neighbouring steps that decode the whole batch and nothing else."""
    return [
        later.ended - earlier.ended
        for earlier, later in pairwise(run.steps)
        if earlier.num_rows == earlier.num_tokens == later.num_rows == later.num_tokens == batch
    ]


def whole_steps(run: Run, batch: int) -> range:
    """The steps that decode the whole batch and nothing else.

    They are neighbours: before them prompts are computed, and behind them are fewer rows, because those that were
    computed first end first.
    """
    found = [i for i, step in enumerate(run.steps) if step.num_rows == step.num_tokens == batch]
    return range(found[0], found[-1] + 1)


def bytes_read(model: ModelConfig, batch: int, context: float, itemsize: float = 2, weight_bits: float = 16) -> float:
    """What a decode step must at least read: all weights but an untied embedding, and the rows' keys and values.

    `itemsize` is of keys and values, and of weights unless these have other bits. Of a mixture, only those experts
    count that a single token uses.
    """
    kv = sum(s.num_heads * (s.key_dim + s.value_dim) for s in model.kv) * context * batch
    return itemsize * kv + weight_bits / 8 * model.num_step_weights


def measure(
    engine: LocalEngine,
    model: ModelConfig,
    batch: int,
    context: int,
    num_steps: int,
    sizes: Mapping[str, float] = _PLAIN,
) -> dict[str, float]:
    """The figures of one batch size; `sizes` as in `bytes_read`."""
    prompts, lens = fixed(context, batch)[0], [num_steps] * batch
    prompts = [[token % model.vocab_size for token in prompt] for prompt in prompts]
    engine.run(prompts, sampling_of([4] * batch))
    run = engine.run(prompts, sampling_of(lens))
    times = decode_times(run, batch)
    timed = whole_steps(run, batch)
    queued, launching = engine.repeat(run.plans[: timed.stop], timed.start)
    step = statistics.median(times)
    return {
        "batch": batch,
        "context": context,
        "step_ms": step * 1e3,
        "queued_ms": queued * 1e3,
        "exposed_ms": max(0.0, step - queued) * 1e3,
        "launch_ms": launching * 1e3,
        "idle_us": statistics.median(run.steps[i].idle_us for i in timed[1:]),
        "bytes_read": bytes_read(model, batch, context + num_steps / 2, **sizes),
    }


def decode_engine(shape: str, max_num_seqs: int, dry: bool, **options: Any) -> tuple[LocalEngine, ModelConfig]:
    """An engine of a shape, and what its model is; `dry`: on the CPU, with a small pool."""
    sizes = {
        "device": "cpu" if dry else "cuda",
        "max_num_batched_tokens": 64 if dry else 16384,
        "max_model_len": 128 if dry else 16384,
        "num_pages": 64 if dry else 0,
    }
    folder = shape_folder(shape)
    return LocalEngine(folder, max_num_seqs=max_num_seqs, **(sizes | options)), described(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a folder name in bench/shapes")
    parser.add_argument("--batch", default="1,256", help="batch sizes, separated by commas")
    parser.add_argument("--dry", action="store_true", help="tiny sizes and shape on the CPU")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of `penstock serve`")
    parser.add_argument("--quantization", default="", help="as of `penstock serve`")
    parser.add_argument("--page-size", type=int, default=16, help="as of `penstock serve`")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    batches = [1, 3] if args.dry else [int(batch) for batch in args.batch.split(",")]
    shape = "tiny" if args.dry else args.shape
    options = {
        "enforce_eager": args.enforce_eager,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
        "page_size": args.page_size,
    }
    engine, model = decode_engine(shape, max(batches), args.dry, **options)
    of_bits = {
        "itemsize": _KV_BYTES.get(args.kv_cache_dtype, 2),
        "weight_bits": _WEIGHT_BITS.get(args.quantization, 16),
    }
    rows = []
    for batch in batches:
        context = 8 if args.dry else _CONTEXT.get(batch, 1024)
        rows.append(measure(engine, model, batch, context, 6 if args.dry else _NUM_STEPS, of_bits))
        shown = ", ".join(
            f"{name} {rows[-1][name]:.3f}" for name in ("step_ms", "queued_ms", "exposed_ms", "launch_ms")
        )
        print(f"decode {shape} B={batch} context {context}: {shown}", flush=True)
    record = {"kind": "decode_step", "shape": shape, "dry": args.dry, "device": engine.hello.device, "rows": rows}
    record |= {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype, "page_size": args.page_size}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
