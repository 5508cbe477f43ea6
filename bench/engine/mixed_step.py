"""Steps that decode B rows and compute a chunk of a prompt beside them: what a stream feels while prompts come in.

    python -m bench.engine.mixed_step --shape qwen3-0.6b [--batch 32] [--chunk 512,2000] [--out FILE.json]

`step` is the time from result to result, `device` the device's own time in it, `idle` the time before it in which the
device waited for the host, `launch` what the host needs to launch one.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from bench.engine.decode_step import decode_engine
from bench.engine.offline import fixed, sampling_of
from bench.local_engine import LocalEngine

_CHUNKS_OF_A_PROMPT = 4
_NUM_PROMPTS = 6


def measure(engine: LocalEngine, vocab_size: int, batch: int, chunk: int) -> dict[str, float]:
    """The figures of one size of chunk; zeros if no step was of that kind."""
    context = 8 if chunk < 64 else 256
    decoding = fixed(context, batch)[0]
    coming = fixed(_CHUNKS_OF_A_PROMPT * chunk, _NUM_PROMPTS)[0]
    prompts = [[token % vocab_size for token in prompt] for prompt in decoding + coming]
    lens = [_CHUNKS_OF_A_PROMPT * _NUM_PROMPTS + 16 + batch * context // chunk] * batch + [1] * _NUM_PROMPTS
    run = engine.run(prompts, sampling_of(lens))
    pairs = [
        (earlier, later)
        for earlier, later in pairwise(run.steps)
        if later.num_rows >= batch and 0.8 * chunk <= later.num_tokens - later.num_rows <= chunk
    ]
    figures = {"batch": float(batch), "chunk": float(chunk), "num_steps": float(len(pairs))}
    if not pairs:
        return figures | dict.fromkeys(("step_ms", "device_ms", "idle_ms", "launch_ms"), 0.0)
    _, launching = engine.repeat(run.plans, 0)
    return figures | {
        "step_ms": statistics.median(later.ended - earlier.ended for earlier, later in pairs) * 1e3,
        "device_ms": statistics.median(later.device_us for _, later in pairs) / 1e3,
        "idle_ms": statistics.median(later.idle_us for _, later in pairs) / 1e3,
        "launch_ms": launching * 1e3,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="a folder name in bench/shapes")
    parser.add_argument("--batch", type=int, default=32, help="rows that decode")
    parser.add_argument("--chunk", default="512,2000", help="prompt tokens a step, separated by commas")
    parser.add_argument("--dry", action="store_true", help="tiny sizes and shape on the CPU")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    chunks = [16] if args.dry else [int(chunk) for chunk in args.chunk.split(",")]
    batch = 3 if args.dry else args.batch
    shape = "tiny" if args.dry else args.shape
    rows = []
    for chunk in chunks:
        tokens = batch + chunk
        engine, model = decode_engine(
            shape, batch + 8, args.dry, max_num_batched_tokens=tokens, enforce_eager=args.enforce_eager
        )
        rows.append(measure(engine, model.vocab_size, batch, chunk))
        shown = ", ".join(f"{name} {rows[-1][name]:.3f}" for name in ("step_ms", "device_ms", "idle_ms", "launch_ms"))
        print(f"mixed {shape} B={batch} chunk {chunk}: {shown} ({rows[-1]['num_steps']:.0f} steps)", flush=True)
        device = engine.hello.device
        del engine
    record = {"kind": "mixed_step", "shape": shape, "dry": args.dry, "device": device, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
