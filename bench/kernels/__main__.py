"""Times every kernel at serving shapes beside the card's own limits and, where installed, other libraries.

    python -m bench.kernels [--out FILE.json] [--only decode,prefill,small,experts,sampling,quantized,quantized_kv]
    python -m bench.kernels --dry       # the same code at tiny sizes on the CPU: proves that it runs, measures nothing

Needs nothing from the network. Shares are of the memory rate (the better of a copy and a read) and the bf16 matrix
rate that the same run measured.
"""

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from bench.kernels.inputs import AttentionProblem, attention_calls
from bench.kernels.peers import Peer, decode_peers, prefill_peers
from bench.kernels.quantized import quantized_cases
from bench.kernels.small import Case, expert_cases, kv_write_cases, sampling_cases, small_cases
from bench.kernels.timing import measure_limits, time_calls
from penstock.kernels.attention.kv_quantization import KV_FORMATS

PARTS = ("decode", "prefill", "small", "experts", "sampling", "quantized", "quantized_kv")


@dataclass(frozen=True)
class Result:
    """One timed case. `share` is of the limit that binds it (bandwidth or matrix rate); peers map to seconds.

    Those that failed map to why.
    """

    part: str
    case: str
    seconds: float
    rate: float
    unit: str
    share: float
    peers: dict[str, float]
    failed_peers: dict[str, str] = field(default_factory=dict)


Timer = Callable[[Sequence[Callable[[], object]]], float]


def time_peers(timer: Timer, peers: Iterable[Peer]) -> tuple[dict[str, float], dict[str, str]]:
    """(seconds, why not) by name: what another library cannot do must not cost the case, or those after it."""
    seconds, failures = {}, {}
    for name, make in peers:
        try:
            seconds[name] = timer(make())
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"[:300]
    return seconds, failures


def bench_decode(timer: Timer, limits: dict[str, float], dry: bool) -> Iterator[Result]:
    """Llama-3.1-8B heads (the KV shape of Qwen3-8B too), batch 1 to 256, context 1k to 32k, at most 20 GB of KV."""
    shapes = [
        (b, c) for b in (1, 8, 32, 64, 128, 256) for c in (1024, 4096, 8192, 32768) if b * c <= 160 * 1024 or b == 1
    ]
    shapes.append((256, 2048))
    for batch, context in [(2, 40)] if dry else shapes:
        problem = small(AttentionProblem(batch, 1, context), dry)
        yield decode_result("decode", problem, timer, limits, decode_peers(problem))


def bench_prefill(timer: Timer, limits: dict[str, float], dry: bool) -> Iterator[Result]:
    """Fresh prompts of 1k to 16k tokens, chunks behind a cached prefix, and many short prompts."""
    shapes = [(1, n, n) for n in (1024, 2048, 4096, 8192, 16384)]
    shapes += [(1, 2048, 8192), (1, 2048, 16384), (16, 512, 512), (8, 256, 4096)]
    for batch, query_len, context in [(2, 5, 9)] if dry else shapes:
        problem = small(AttentionProblem(batch, query_len, context), dry)
        yield prefill_result("prefill", problem, timer, limits, prefill_peers(problem))


def bench_quantized_kv(timer: Timer, limits: dict[str, float], dry: bool) -> Iterator[Result]:
    """Attention over pages of each format, and the kernel that writes them."""
    for kv in KV_FORMATS:
        for batch, context in [(2, 40)] if dry else [(1, 32768), (8, 8192), (64, 2048)]:
            problem = small(AttentionProblem(batch, 1, context, kv=kv), dry)
            yield decode_result("quantized_kv", problem, timer, limits, ())
        for query_len, context in [(5, 9)] if dry else [(8192, 8192), (2048, 16384)]:
            problem = small(AttentionProblem(1, query_len, context, kv=kv), dry)
            yield prefill_result("quantized_kv", problem, timer, limits, ())
    yield from bench_cases("quantized_kv", timer, limits, dry)


def decode_result(
    part: str, problem: AttentionProblem, timer: Timer, limits: dict[str, float], peers: Iterable[Peer]
) -> Result:
    seconds = timer(attention_calls(problem, problem.rotations))
    rate = problem.kv_bytes / seconds
    size = f"({problem.kv_bytes / 2**20:.0f} MiB)"
    name = " ".join(filter(None, (f"B={problem.batch} context={problem.context}", problem.kv, size)))
    timed = time_peers(timer, peers)
    return Result(part, name, seconds, rate / 1e9, "GB/s", rate / limits["memory_bytes_per_s"], *timed)


def prefill_result(
    part: str, problem: AttentionProblem, timer: Timer, limits: dict[str, float], peers: Iterable[Peer]
) -> Result:
    seconds = timer(attention_calls(problem, problem.rotations))
    rate = problem.flops / seconds
    name = f"B={problem.batch} new={problem.query_len} context={problem.context} {problem.kv}".rstrip()
    timed = time_peers(timer, peers)
    return Result(part, name, seconds, rate / 1e12, "TFLOP/s", rate / limits["matrix_flop_per_s"], *timed)


def bench_cases(part: str, timer: Timer, limits: dict[str, float], dry: bool) -> Iterator[Result]:
    """Norms, activation, rotary embedding with the KV write; mixtures; sampling at 152k tokens; quantized weights."""
    parts: dict[str, Callable[[bool], Iterable[Case]]] = {
        "small": small_cases,
        "experts": expert_cases,
        "sampling": sampling_cases,
        "quantized": quantized_cases,
        "quantized_kv": kv_write_cases,
    }
    for case in parts[part](dry):
        seconds = timer(case.calls)
        rate, flop_rate = case.bytes_per_call / seconds, case.flops_per_call / seconds
        share, flop_share = rate / limits["memory_bytes_per_s"], flop_rate / limits["matrix_flop_per_s"]
        peers = time_peers(timer, ((name, functools.partial(list, calls)) for name, calls in case.peers))
        if flop_share > share:
            yield Result(part, case.name, seconds, flop_rate / 1e12, "TFLOP/s", flop_share, *peers)
        else:
            yield Result(part, case.name, seconds, rate / 1e9, "GB/s", share, *peers)


def small(problem: AttentionProblem, dry: bool) -> AttentionProblem:
    if not dry:
        return problem
    shape = {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 4,
        "dtype": torch.float32,
        "device": "cpu",
    }
    return replace(problem, **shape)  # type: ignore[arg-type]


def time_on_cpu(calls: Sequence[Callable[[], object]]) -> float:
    """One call, for the dry form."""
    begin = time.perf_counter()
    calls[0]()
    return time.perf_counter() - begin


def line_of(result: Result) -> str:
    peers = "  ".join(
        [f"{name} {seconds * 1e6:.1f}" for name, seconds in result.peers.items()]
        + [f"{name} failed: {why}" for name, why in result.failed_peers.items()]
    )
    rate = f"{result.rate:8.0f} {result.unit}"
    figures = f"{result.seconds * 1e6:9.1f} us {rate} {100 * result.share:5.1f} %"
    return f"{result.part:9s} {result.case:44s} {figures}   {peers}"


def _write(path: Path, device: str, dry: bool, limits: dict[str, float], results: Sequence[Result]) -> None:
    record = {"device": device, "dry": dry, "torch": torch.__version__, "python": platform.python_version()}
    path.write_text(json.dumps({**record, "limits": limits, "results": [asdict(r) for r in results]}, indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    args = parser.parse_args(argv)
    parts = args.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if not args.dry and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry runs the same code on the CPU")
    if args.dry:
        timer: Timer = time_on_cpu
        limits = {"memory_bytes_per_s": 1e10, "matrix_flop_per_s": 1e11}  # placeholders: nothing is measured
        device = "none (dry run; no figure below means anything)"
    else:
        timer = time_calls
        limits = measure_limits()
        device = torch.cuda.get_device_name()
    print(f"device: {device}; torch {torch.__version__}")
    memory, matrix = limits["memory_bytes_per_s"] / 1e12, limits["matrix_flop_per_s"] / 1e12
    print(f"memory {memory:.2f} TB/s, bf16 matrix product {matrix:.0f} TFLOP/s")
    results: list[Result] = []
    benches = {"decode": bench_decode, "prefill": bench_prefill, "quantized_kv": bench_quantized_kv}
    for part in parts:
        bench = benches.get(part) or functools.partial(bench_cases, part)
        for result in bench(timer, limits, args.dry):
            results.append(result)
            print(line_of(result), flush=True)
            if args.out:  # after each case: a run that is cut short keeps what it has
                _write(args.out, device, args.dry, limits, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
