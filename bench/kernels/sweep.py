"""Times the attention kernels over tile sizes, to choose constants of `kernels/triton/attention/paged_attention.py`.

    python -m bench.kernels.sweep [--kv int8] [--out FILE]

Kernels are compiled first by several processes into Triton's cache; then one process measures. Needs a GPU.
"""

import argparse
import itertools
import json
import multiprocessing
import sys
from pathlib import Path

import torch

from bench.kernels.inputs import AttentionProblem, attention_calls
from bench.kernels.timing import time_calls
from penstock.kernels.attention.kv_quantization import KV_FORMATS
from penstock.kernels.triton.attention.paged_attention import DecodeTiles, PrefillTiles

PAGE_SIZES = (16, 128)
DECODE_PROBLEMS = [(1, 1024), (1, 32768), (8, 4096), (64, 1024), (256, 1024), (32, 8192)]
DECODE_TILES = [
    *itertools.product((32, 64), (3, 5, 7), (4,)),
    *itertools.product((64,), (5,), (2, 8)),
    *itertools.product((128,), (3, 4, 5), (4, 8)),
]
SPLITS = {(1, 1024): (8, 16, 32), (1, 32768): (32, 64, 128), (8, 4096): (4, 8, 16), (32, 8192): (1, 2, 4, 8),
          (64, 1024): (1, 2, 4), (256, 1024): (1, 2)}  # fmt: skip
PREFILL_PROBLEMS = [(1, 8192, 8192), (4, 1024, 1024), (1, 2048, 16384)]
PREFILL_TILES = [
    PrefillTiles(*tiles)
    for tiles in (
        (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (128, 32, 8, 3, 2), (128, 32, 8, 5, 2), (128, 16, 8, 5, 2),
        (64, 64, 4, 3, 2), (64, 64, 4, 5, 2), (64, 64, 4, 3, 3), (64, 32, 4, 3, 3), (64, 32, 4, 5, 3), (64, 128, 4, 3),
    )
]  # fmt: skip


def jobs(*, prefill_only: bool) -> list[tuple[int, tuple[int, ...], DecodeTiles | PrefillTiles]]:
    out: list[tuple[int, tuple[int, ...], DecodeTiles | PrefillTiles]] = []
    for page_size in PAGE_SIZES:
        for problem in () if prefill_only else DECODE_PROBLEMS:
            for (block_n, stages, warps), splits in itertools.product(DECODE_TILES, SPLITS[problem]):
                out.append((page_size, problem, DecodeTiles(block_n, splits, 1, warps, stages)))
        for prefill in PREFILL_PROBLEMS:
            out.extend((page_size, prefill, tiles) for tiles in PREFILL_TILES)
    return out


def problem_of(page_size: int, shape: tuple[int, ...], kv: str) -> AttentionProblem:
    batch, query_len, context = shape if len(shape) == 3 else (shape[0], 1, shape[1])
    return AttentionProblem(batch, query_len, context, page_size=page_size, kv=kv)


def compile_share(share: int, of: int, kv: str, prefill_only: bool) -> None:
    """Launch each kernel once on a small problem, which puts it into the cache."""
    seen = set()
    for page_size, shape, tiles in jobs(prefill_only=prefill_only)[share::of]:
        key = (page_size, len(shape), tiles)
        if key in seen:
            continue
        seen.add(key)
        small = AttentionProblem(4, 1 if len(shape) == 2 else 32, 64, page_size=page_size, kv=kv)
        try:
            attention_calls(small, 1, tiles)[0]()
        except Exception as error:  # too much shared memory, say: measured as nothing below
            print("skip", tiles, type(error).__name__, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kv", choices=("", *KV_FORMATS), default="", help="the format of quantized KV")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--prefill-only", action="store_true", help="no decodes, which take most of the time")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_share, args=(i, args.processes, args.kv, args.prefill_only))
        for i in range(args.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results = []
    for (page_size, shape), group in itertools.groupby(jobs(prefill_only=args.prefill_only), key=lambda job: job[:2]):
        problem = problem_of(page_size, shape, args.kv)
        calls_of = {}
        timed = []
        for _, _, tiles in group:
            try:
                calls_of[tiles] = attention_calls(problem, problem.rotations, tiles)
                timed.append((time_calls(calls_of[tiles], budget_ms=8), tiles))
            except Exception as error:
                print("skip", shape, tiles, type(error).__name__, str(error)[:60])
                torch.cuda.synchronize()
        timed.sort(key=lambda pair: pair[0])
        unit = "GB/s" if len(shape) == 2 else "TFLOP/s"
        work = problem.kv_bytes / 1e9 if len(shape) == 2 else problem.flops / 1e12
        print(
            f"page {page_size} {shape}: "
            + "; ".join(f"{tuple(t)} {s * 1e6:.1f} us {work / s:.0f} {unit}" for s, t in timed[:7])
        )
        results += [{"page_size": page_size, "shape": shape, "tiles": tuple(t), "seconds": s} for s, t in timed]
    if args.out:
        args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
