"""Timing on a CUDA device: graph replays over rotating inputs, and the card's own measured limits."""

import functools
import statistics
from collections.abc import Callable, Sequence

import torch

ROTATE_BYTES = 512 << 20
"""Inputs rotate over at least this much memory, several times the L2 cache, so that no call reads a warm cache."""


def num_rotations(bytes_per_call: int, most: int = 64) -> int:
    return max(1, min(most, -(-ROTATE_BYTES // max(1, bytes_per_call))))


def time_calls(calls: Sequence[Callable[[], object]], budget_ms: float = 60.0) -> float:
    """Median seconds of one call: `calls` (same work, different memory) are captured in one graph and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    spent = 0.0
    while len(times) < 5 or (spent < budget_ms and len(times) < 50):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        elapsed = begin.elapsed_time(end)
        spent += elapsed
        times.append(elapsed)
    return statistics.median(times) / 1e3 / len(calls)


def measure_limits() -> dict[str, float]:
    """This card's memory rate (bytes per second, the better of a copy and of a read) and bf16 matrix rate (FLOP/s).

    Reads and writes that take turns reach less than reads alone on some cards: an H100 copied 2.4 TB/s (both counted)
    and read 3.1.
    """
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / time_calls([functools.partial(target.copy_, source)])
    total = torch.empty((), device="cuda")
    read = source.nbytes / time_calls([functools.partial(torch.sum, source, dim=0, out=total)])
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = time_calls([functools.partial(torch.mm, a, b, out=out)], budget_ms=100)
    return {
        "copy_bytes_per_s": copied,
        "read_bytes_per_s": read,
        "memory_bytes_per_s": max(copied, read),
        "matrix_flop_per_s": 2 * 8192**3 / product,
    }
