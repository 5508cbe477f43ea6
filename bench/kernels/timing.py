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
    """Copy bandwidth (bytes read + written per second) and bf16 matrix rate (FLOP/s) of this card."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / time_calls([functools.partial(target.copy_, source)])
    del source, target
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = time_calls([functools.partial(torch.mm, a, b, out=out)], budget_ms=100)
    return {"copy_bytes_per_s": bandwidth, "matrix_flop_per_s": 2 * 8192**3 / product}
