"""Is this checkout as fast as another one? Two processes take turns: the same decodes, prompts and scheduler steps.

    python -m bench.engine.against OTHER [--model PATH | --shape NAME] [--rounds N] [--out FILE.json]

OTHER is another checkout's folder, with Penstock installed in its `.venv` and its CPU kernels built; or a folder with a
wheel installed in its `.venv`, and a link to this `bench`. A folder's model has random weights, a GGUF file its own.
Each process keeps one engine; a turn takes a fraction of a second, and what comes first changes from round to round, so
that what else the machine does falls on both. A turn's figure is the lower quartile of its steps. The table has the
median of each checkout's turns, and the median of the ratios of neighbouring turns: below 1, this checkout is the
faster one. `--cases "cpu 1"` counts the time that the process itself computed for a token, on a machine that has much
else to do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

_HERE = Path(__file__).resolve().parents[2]
_CASES = (
    "scheduler 1", "scheduler 64", "scheduler 256", "decode 1", "decode 4", "decode 16", "mixed 8", "prefill 1024",
)  # fmt: skip
_CONTEXT = 128
_OUTPUT = 60


class Checkout:
    """A process that measures one checkout when it is told to."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        python, script = folder / ".venv" / "bin" / "python", Path(__file__).resolve()
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [python, script, "--measure", str(model), str(threads)],
            cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> "Checkout":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def turn(self, case: str) -> float:
        """Measure a case once: microseconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def _modules(benches: Path) -> list[str]:
    """Where a checkout has what measures it: early commits have it elsewhere."""
    if (benches / "engine" / "cpu.py").exists():
        room = "engine" if (benches / "engine" / "scheduler.py").exists() else "scheduling"
        return ["bench.engine.cpu", f"bench.{room}.scheduler", "bench.local_engine", "bench.engine.offline"]
    package = "bench" if (benches / "load").exists() else "penstock.bench"
    return [f"{package}.{name}" for name in ("cpu", "scheduler", "local_engine", "offline")]


def _measurer(model: Path, threads: int) -> Callable[[str], float]:
    """In a checkout's process, with the benches and the engine of that checkout."""
    cpu, scheduler, local_engine, offline = map(import_module, _modules(Path.cwd() / "bench"))
    engine = local_engine.LocalEngine(
        model, device="cpu", max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=2048, num_pages=512,
        num_threads=threads, cpu_kernels="native", load_format="dummy" if model.is_dir() else "safetensors",
    )  # fmt: skip
    has_config = not model.is_file()
    vocab_size = (
        json.loads((model / "config.json").read_text())["vocab_size"] if has_config else engine.hello.vocab_size
    )

    def measure(case: str) -> float:
        kind, _, number = case.partition(" ")
        size = int(number)
        if kind == "scheduler":
            return float(scheduler.measure(size, 400, 0, with_codec=False))
        if kind == "decode":
            steps = cpu.decode_ms(engine, vocab_size, size, _CONTEXT, _OUTPUT)
            return float(1e3 * statistics.quantiles(steps, n=4)[0])
        if kind == "prefill":
            return float(1e3 * cpu.prefill_ms(engine, vocab_size, size))
        tokens = [i % (vocab_size - 5) + 5 for i in range(7, 7 + 512)]
        prompts, lengths = [tokens[i : i + _CONTEXT] for i in range(size)], [_OUTPUT] * size
        if kind == "cpu":
            began = time.process_time()
            run = engine.run([prompt[:1] for prompt in prompts], offline.sampling_of(lengths))
            return float(1e6 * (time.process_time() - began) / run.num_output_tokens)
        return float(1e6 * engine.run([*prompts, tokens[::-1], tokens], offline.sampling_of([*lengths, 4, 4])).seconds)

    return measure


def _serve(model: Path, threads: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is logged is no answer
    measure = _measurer(model, threads)
    for line in sys.stdin:
        print(measure(line.strip()), file=answers, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout's folder")
    parser.add_argument("--model", type=Path, help="a checkpoint folder (default: the demo model)")
    parser.add_argument("--shape", help="a folder name in bench/shapes, in place of --model")
    parser.add_argument("--cases", default=",".join(_CASES), help="what is measured, separated by commas")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    # Here and not above: the other checkout runs this file, too, and may have them elsewhere.
    from bench.machine import command, commit, machine
    from bench.shapes_folder import shape_folder

    model = shape_folder(args.shape) if args.shape else args.model or _HERE / "demo" / "model"
    rows = []
    with ExitStack() as stack:
        folders = {"other": args.other.resolve(), "this": _HERE}
        both = {name: stack.enter_context(Checkout(path, model, args.threads)) for name, path in folders.items()}
        print(f"{'case':16} {'other, us':>12} {'this, us':>12} {'ratio':>8}")
        for case in args.cases.split(","):
            for checkout in both.values():
                checkout.turn(case)  # the first one warms
            times: dict[str, list[float]] = {name: [] for name in both}
            for turn in range(args.rounds):
                for name in list(both)[:: 1 if turn % 2 else -1]:
                    times[name].append(both[name].turn(case))
            other, this = times["other"], times["this"]
            ratio = statistics.median(ours / theirs for theirs, ours in zip(other, this, strict=True))
            rows.append({"case": case, "ratio": ratio, "other_us": other, "this_us": this})
            print(
                f"{case:16} {statistics.median(other):12.1f} {statistics.median(this):12.1f} {ratio:8.3f}", flush=True
            )
    if args.out:
        commits = {name: commit(path) for name, path in folders.items()}
        record = {
            "kind": "against",
            "command": command("bench.engine.against", argv),
            "commits": commits,
            "model": model.name,
        }
        args.out.write_text(json.dumps(record | {"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
