"""Decode steps with keys and values of each type on a CPU, taken in turn: one model, a pool of each type.

    python -m bench.formats.kv_dtypes [--shape NAME] [--context 8192] [--rows 1,4,16] [--threads N] [--out FOLDER]

Pages hold random keys and values, and weights are random: times do not depend on what they are. Beside each time is
what the step reads, and that as a share of the rate at which the kernels' own reader reads memory.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.engine.decode_step import bytes_read
from bench.machine import commit, machine
from bench.shapes_folder import described, shape_folder
from penstock.gpu_worker.devices.cpu import CpuDevice
from penstock.gpu_worker.devices.open import open_device
from penstock.gpu_worker.models.loading.loader import dummy_model
from penstock.gpu_worker.models.model import Model
from penstock.gpu_worker.state.kv_pool import KVPool, KVType, kv_name, page_groups
from penstock.kernels.attention.kv_quantization import KV_FORMATS, KVFormat, write_quantized

_PAGE_SIZE = 16
_ROUNDS = 15
_READ_FLOATS = 1 << 26


class Timed(NamedTuple):
    """Steps over one pool."""

    name: str
    step: Callable[[], object]
    num_bytes: float  # that a step reads
    page_bytes: int


def random_pool(model: Model, kv: KVType, num_pages: int) -> KVPool:
    """Keys and values of the usual size everywhere."""
    pool = KVPool(page_groups(model.config, _PAGE_SIZE), num_pages, kv, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for layer in pool.layers:
        for pages in (layer.keys, layer.values):
            first = pages[: min(num_pages, 64)]
            if layer.layout is None:
                first.copy_(torch.randn(first.shape, generator=generator))
            else:
                cells = torch.arange(first.shape[0] * first.shape[1] * _PAGE_SIZE)
                x = torch.randn(len(cells), layer.layout.head_dim, generator=generator)
                write_quantized(first, layer.layout, cells, x)
            for at in range(len(first), num_pages, len(first)):
                rest = pages[at : at + len(first)]
                rest.copy_(first[: len(rest)])
    return pool


def decode(model: Model, kv: KVType, num_rows: int, context: int) -> Timed:
    """A step of rows that each see this many positions."""
    pages_of_row = -(-context // _PAGE_SIZE)
    pool = random_pool(model, kv, num_rows * pages_of_row)
    table = torch.randperm(num_rows * pages_of_row).int().view(num_rows, pages_of_row)
    ids: Tensor = torch.ones(num_rows, context + 1, dtype=torch.int32)
    whole = model.whole_step(ids, [table] * len(pool.groups), pool)
    assert whole is not None
    rows = np.arange(num_rows, dtype=np.int32)
    start, one = np.full(num_rows, context - 1, dtype=np.int32), np.ones(num_rows, dtype=np.int32)
    compute, samples = whole.compute, rows.astype(np.int64)
    plain = bytes_read(model.config, num_rows, 0)
    of_kv = sum(group.bytes_per_token(kv) for group in pool.groups) * context * num_rows
    name = kv.name if isinstance(kv, KVFormat) else kv_name(kv)
    return Timed(name, lambda: compute(rows, start, one, samples), plain + of_kv, pool.page_bytes)


def in_turn(of_types: Sequence[Timed], read: Callable[[], object], rounds: int) -> tuple[list[float], float]:
    """Median seconds of each, and of a read."""
    times: list[list[float]] = [[] for _ in of_types]
    reads = []
    for _ in range(rounds):
        for seconds, its in zip(times, of_types, strict=True):
            seconds.append(_seconds(its.step))
        reads.append(_seconds(read))
    return [statistics.median(each) for each in times], statistics.median(reads)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="a folder name in bench/shapes")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rows", default="1,4,16", help="rows of a step, separated by commas")
    parser.add_argument("--types", default=",".join(("bfloat16", *KV_FORMATS)), help="the first is what others gain on")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, help="folder for kv_dtypes.json")
    args = parser.parse_args(argv)
    device = open_device("cpu", args.threads, "native")
    assert isinstance(device, CpuDevice)
    library = device.library
    assert library is not None
    model_config = described(shape_folder(args.shape))
    model = dummy_model(model_config, torch.bfloat16, device)
    types: list[KVType] = [KV_FORMATS.get(name) or getattr(torch, name) for name in args.types.split(",")]
    data = torch.ones(_READ_FLOATS)
    found: list[dict[str, Any]] = []
    for num_rows in map(int, args.rows.split(",")):
        model.prepare(device, num_rows, args.context)
        steps = [decode(model, kv, num_rows, args.context) for kv in types]
        seconds, reading = in_turn(steps, lambda: library.read(data), args.rounds)
        rate = data.nbytes / reading
        for its, each in zip(steps, seconds, strict=True):
            row = {
                "rows": num_rows,
                "kv": its.name,
                "ms": each * 1e3,
                "gain": seconds[0] / each,
                "mb_read": its.num_bytes / 1e6,
                "share_of_memory_rate": its.num_bytes / each / rate,
                "pages": steps[0].page_bytes / its.page_bytes,
            }
            found.append(row)
            print(
                f"{num_rows:3} rows of {args.context}, KV {its.name:9} {row['ms']:8.1f} ms, {row['gain']:.2f} times; "
                f"reads {row['mb_read']:.0f} MB, {row['share_of_memory_rate']:.0%} of {rate / 1e9:.1f} GB/s; "
                f"{row['pages']:.2f} times the pages",
                flush=True,
            )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"kind": "kv_dtypes", "commit": commit(), "machine": machine(), "options": vars(args), "found": found}
        (args.out / "kv_dtypes.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
