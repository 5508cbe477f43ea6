"""Scans of recurrent layers by the CPU's own kernels: one row's decoding beside memory, prompts beside attention's.

    python -m bench.kernels.recurrent [--threads N] [--out FILE.json]

Decoding: each step updates the states of all layers, which are more than the processor's caches hold; with the weights
of their layers and without. The roof is what these bytes take where they are only read (weights), and only multiplied
in place (states). Prompts: one layer's scan and one layer's attention over the same prompt, the same numbers a token
wide; with its convolution. They take turns, and the fastest of each counts: others may use the machine meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.machine import commit, machine
from penstock.gpu_worker.state.kv_pool import LayerPages
from penstock.kernels.attention.qk_norm_rope_write import QKNorms
from penstock.kernels.native.build import build
from penstock.kernels.native.library import Library
from penstock.kernels.native.pool import NativePool
from penstock.kernels.native.program.builder import HeadShape, ProgramBuilder, QueryGrowth
from penstock.kernels.native.program.program import GroupPages
from penstock.kernels.native.recurrent import (
    DeltaShape,
    Mamba2Shape,
    Part,
    convolve,
    norm_gated,
    scan_gated_delta,
    scan_mamba2,
)
from penstock.kernels.scan.causal_conv1d import ConvWeights
from penstock.kernels.scan.gated_norm import GatedNorm
from penstock.lab.calibration.rates import read_rate

HIDDEN, INNER = 2048, 4096
MAMBA2 = Mamba2Shape(64, 1, 64, 128)  # as Granite 4 and Bamba have it
DELTA = DeltaShape(32, 16, 128, 128)  # as Qwen3-Next has it
ATTENTION = HeadShape(32, 8, 128)
NUM_LAYERS = 24
PAGE = 16


class Layers:
    """A program of recurrent layers, or of their scans alone."""

    def __init__(self, kind: str, library: Library, num_layers: int, *, whole: bool) -> None:
        builder, self.states = ProgramBuilder(HIDDEN), list[Tensor]()
        self.weight_bytes = 0
        mixed = 2 * 128 + INNER if kind == "mamba2" else 2 * 16 * 128 + INNER
        gates = 64
        x, projected = builder.slot(HIDDEN), builder.slot(mixed + INNER + gates)
        scanned = builder.slot(INNER)
        builder.embed(torch.randn(16, HIDDEN), x)
        builder.embed(torch.randn(16, mixed + INNER + gates), projected)

        def product(num_outputs: int, num_inputs: int, source: int, to: int, finish: Any) -> None:
            packed = library.pack((torch.randn(num_outputs, num_inputs) / num_inputs**0.5).bfloat16())
            self.weight_bytes += packed.weight.nbytes
            builder.product(packed, source, to, finish)

        for _ in range(num_layers):
            if whole:
                product(mixed + INNER + gates, HIDDEN, x, projected, "store")
            self._add_scan(builder, kind, projected, scanned, mixed, mixed + INNER)
            if whole:
                norm_gated(builder, GatedNorm(torch.ones(INNER)), scanned, Part(projected, mixed), INNER)
                product(HIDDEN, INNER, scanned, x, "add")
        builder.norm(None, x, ProgramBuilder.OUT, HIDDEN)
        self._program = builder.build(library, None)
        self._pool = NativePool([], (), self.states)
        self.state_bytes = sum(state[0].nbytes for state in self.states)

    def _add_scan(
        self, builder: ProgramBuilder, kind: str, projected: int, scanned: int, mixed: int, gates: int
    ) -> None:
        at = len(self.states)
        self.states += [
            torch.zeros(2, 3, mixed),
            torch.zeros(2, 64, 128, 64) if kind == "mamba2" else torch.zeros(2, 32, 128, 128),
        ]
        convolve(builder, ConvWeights(torch.randn(mixed, 4)), at, Part(projected), Part(projected))
        if kind == "mamba2":
            scan_mamba2(
                *(builder, MAMBA2, at + 1, projected, 0, INNER, INNER + 128, gates, scanned),
                a=-torch.rand(64), d=torch.rand(64), dt_bias=torch.rand(64), dt_limit=(0.0, float("inf")),
            )  # fmt: skip
        else:
            scan_gated_delta(
                *(builder, DELTA, at + 1, projected, 0, 2048, 4096),
                *(Part(projected, gates), Part(projected, gates + 32), scanned),
                a=-torch.rand(32), dt_bias=torch.rand(32),
            )  # fmt: skip

    def seconds(self, num_tokens: int) -> float:
        """Of a step of one row."""
        ids = torch.zeros(num_tokens, dtype=torch.int32)
        loc = torch.tensor([0, num_tokens], dtype=torch.int32)
        rows = torch.ones(1, dtype=torch.int32)
        begin = time.perf_counter()
        self._program.forward(ids, ids.long(), loc, loc[1:], [], [], self._pool, rows=rows)
        return time.perf_counter() - begin


class Attending:
    """One layer's attention, keys and values in fp32 as the states are."""

    def __init__(self, library: Library, num_tokens: int) -> None:
        heads, kv_heads, dim = ATTENTION
        builder = ProgramBuilder(HIDDEN)
        qkv, attended = builder.slot((heads + 2 * kv_heads) * dim), builder.slot(heads * dim)
        builder.embed(torch.randn(16, (heads + 2 * kv_heads) * dim), qkv)
        builder.heads(qkv, ATTENTION, 0, QKNorms(None, None), None, QueryGrowth())
        builder.attend(qkv, attended, ATTENTION, 0, scale=dim**-0.5)
        builder.norm(None, attended, ProgramBuilder.OUT, HIDDEN)
        self._program = builder.build(library, None)
        num_pages = num_tokens // PAGE
        pages = torch.zeros(2, num_pages, kv_heads, PAGE, dim)
        self._pool = NativePool([LayerPages(pages[0], pages[1], 0)])
        self._table = torch.arange(num_pages, dtype=torch.int32)[None]

    def seconds(self, num_tokens: int) -> float:
        """Of a prompt."""
        ids = torch.zeros(num_tokens, dtype=torch.int32)
        loc = torch.tensor([0, num_tokens], dtype=torch.int32)
        slots = torch.arange(num_tokens)
        begin = time.perf_counter()
        self._program.forward(ids, slots, loc, loc[1:], [GroupPages(slots, self._table)], [], self._pool)
        return time.perf_counter() - begin


def update_rate(num_bytes: int, threads: int) -> float:
    """Bytes a second, read and written, where memory is multiplied in place."""
    torch.set_num_threads(threads)
    x, seconds = torch.ones(num_bytes // 4), []
    for _ in range(12):
        begin = time.perf_counter()
        x.mul_(0.999)
        seconds.append(time.perf_counter() - begin)
    return 2 * x.nbytes / min(seconds)


def fastest(runs: dict[str, Callable[[], float]], times: int) -> dict[str, float]:
    """Seconds of each, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times):
        for name, run in runs.items():
            found[name].append(run())
    return {name: min(its) for name, its in found.items()}


def decoding(library: Library, threads: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, and the roof's share of it."""
    layers = {(kind, whole): Layers(kind, library, NUM_LAYERS, whole=whole)
              for kind in ("mamba2", "gated delta") for whole in (False, True)}  # fmt: skip
    names = {f"{kind}, {'layers' if whole else 'scans alone'}": its for (kind, whole), its in layers.items()}
    seconds = fastest({name: lambda its=its: its.seconds(1) for name, its in names.items()}, steps)  # type: ignore[misc]
    reading, updating = read_rate(threads), update_rate(96 << 20, threads)
    made: dict[str, Any] = {"GB/s read": reading / 1e9, "GB/s read and written": updating / 1e9}
    for name, its in names.items():
        roof = its.weight_bytes / reading + 2 * its.state_bytes / updating
        made[name] = {"ms": 1e3 * seconds[name], "MB of weights": its.weight_bytes / 1e6,
                      "MB of states": its.state_bytes / 1e6, "share of roof": roof / seconds[name]}  # fmt: skip
    return made


def prompts(library: Library, num_tokens: int, times: int) -> dict[str, Any]:
    """Milliseconds of a layer, and how often attention's that is."""
    runs: dict[str, Callable[[], float]] = {}
    for kind in ("mamba2", "gated delta"):
        its = Layers(kind, library, 1, whole=False)
        runs[kind] = lambda its=its: its.seconds(num_tokens)  # type: ignore[misc]
    attending = Attending(library, num_tokens)
    seconds = fastest({"attention": lambda: attending.seconds(num_tokens), **runs}, times)
    return {name: {"ms": 1e3 * each, "of attention": each / seconds["attention"]} for name, each in seconds.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a record, and write it if wanted; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of decoding")
    parser.add_argument("--prompts", default="512,2048,8192", help="lengths, separated by commas")
    parser.add_argument("--times", type=int, default=5, help="how often each prompt is computed")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args(argv)
    library = Library(build(), args.threads)
    record: dict[str, Any] = {
        "commit": commit(),
        "command": " ".join(sys.argv[1:]),
        **machine(),
        "threads": args.threads,
    }
    record["decoding one row"] = decoding(library, args.threads, args.steps)
    record["prompts"] = {length: prompts(library, int(length), args.times) for length in args.prompts.split(",")}
    text = json.dumps(record, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
