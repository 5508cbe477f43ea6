"""Times products with quantized weights over tile sizes, to choose constants of `kernels/triton/quantized/linear.py`.

    python -m bench.kernels.sweep_quantized [--formats "GPTQ g128,Q4_K"] [--rows 16,64] [--out FILE]

Kernels are compiled first by several processes into Triton's cache (with `--compile-only`, that is all); then one
process measures. Needs a GPU.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from bench.kernels.quantized import copies, random_weight
from bench.kernels.timing import num_rotations, time_calls
from penstock.kernels.quantized.device_weight import DeviceWeight
from penstock.kernels.quantized.linear import quantized_linear
from penstock.kernels.triton.quantized import linear
from penstock.kernels.triton.quantized.linear import Tiles

_SHAPE = (28672, 4096)  # Llama-3.1-8B's gate and up matrix
_SMALL = (1024, 4096)
_TILES = [
    Tiles(*its)
    for its in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (3, 5))
    if (its[0], its[2]) != (32, 8)
]
_WANTED = (1, 2, 4)
"""Programs a multiprocessor."""


class Choice(NamedTuple):
    """What a launch is given."""

    tiles: Tiles
    wanted: int


def jobs(formats: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[str, int, Tiles]]:
    yield from itertools.product(formats, rows, _TILES)


def product(weight: DeviceWeight, x: torch.Tensor, choice: Choice) -> None:
    """One product with these tiles."""

    def splits(weight: DeviceWeight, tiles: Tiles, num_blocks: int) -> tuple[int, int]:
        steps = -(-weight.num_inputs // tiles.block_k)
        programs = num_blocks * -(-weight.num_outputs // tiles.block_n)
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        of_each = -(-steps // max(1, min(choice.wanted * num_sms // programs, steps // 4, 16)))
        return -(-steps // of_each), of_each * tiles.block_k

    with (
        patch.object(linear, "choose_tiles", lambda *_: choice.tiles),
        patch.object(linear, "choose_splits", splits),
        patch.object(linear, "VECTOR", choice.tiles),
    ):
        quantized_linear(x, weight)


def inputs_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, _SHAPE[1], device="cuda", dtype=torch.bfloat16)


def compile_share(share: int, of: int, formats: Sequence[str], rows: Sequence[int]) -> None:
    """Launch each kernel once on a small problem, which puts it into the cache."""
    weights = {name: random_weight(name, _SMALL, "cuda") for name in formats}
    for name, count, tiles in list(jobs(formats, rows))[share::of]:
        try:
            product(weights[name], inputs_of(count), Choice(tiles, 1))
        except Exception as error:  # what cannot be is measured as nothing below
            print("skip", name, tiles, type(error).__name__, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--formats", default="GPTQ g128,Q4_K,MXFP4")
    parser.add_argument("--rows", default="16,64", help="rows of inputs, separated by commas")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    formats, rows = args.formats.split(","), [int(count) for count in args.rows.split(",")]
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_share, args=(i, args.processes, formats, rows)) for i in range(args.processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if args.compile_only:
        return
    results = []
    for name in formats:
        weight = random_weight(name, _SHAPE, "cuda")
        matrices = copies(weight, min(8, num_rotations(weight.num_bytes)))
        for count in rows:
            x = inputs_of(count)
            chosen = time_calls([functools.partial(quantized_linear, x, its) for its in matrices], budget_ms=8)
            timed = []
            for choice in itertools.starmap(Choice, itertools.product(_TILES, _WANTED)):
                try:
                    calls = [functools.partial(product, its, x, choice) for its in matrices]
                    timed.append((time_calls(calls, budget_ms=6), choice))
                except Exception as error:
                    print("skip", name, count, choice, type(error).__name__, str(error)[:60])
            timed.sort(key=lambda pair: pair[0])
            best = "; ".join(f"{tuple(c.tiles)} x{c.wanted} {s * 1e6:.1f} us" for s, c in timed[:6])
            print(f"{name}, T={count}: chosen {chosen * 1e6:.1f} us; {best}", flush=True)
            results += [
                {"format": name, "rows": count, "tiles": tuple(c.tiles), "wanted": c.wanted, "seconds": s}
                for s, c in timed
            ]
            if args.out:
                args.out.write_text(json.dumps(results))
        del matrices, weight
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
