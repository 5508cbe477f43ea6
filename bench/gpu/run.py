"""Runs the parts of `bench/gpu.sh`, each under a time limit, and writes the table and the archive.

A part is a command with its output in `NAME.log`. Parts of one stage run side by side. What ended with 0 is not run
again in the same folder, so that a run that was cut short can be continued.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHED = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/kernels/launched").glob("test_*.py"))]
_ENGINE_MODULES = ("transformers", "msgspec", "structlog", "safetensors", "tqdm", "llguidance")
_SERVER_MODULES = (
    *_ENGINE_MODULES, "zmq", "aiohttp", "uvloop", "rich", "tokenizers", "jinja2", "prometheus_client", "setproctitle",
    "jsonschema",
)  # fmt: skip
_TEST_MODULES = ("pytest", "pytest_timeout", "xdist")
_NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
_LEAST_SECONDS = 20
"""A part is left out if fewer are left."""


class Part(NamedTuple):
    """One command: a module with its arguments, or a program after a slash; `{out}` in it is the results folder."""

    group: str
    name: str
    seconds: int
    command: Sequence[str]
    needs: Sequence[str] = ()
    dry: Sequence[str] | None = ("--dry",)
    """What is added in the dry form; None leaves the part out."""


def _pytest(name: str, files: Sequence[str], jobs: int, *more: str) -> list[str]:
    return [
        "pytest", "-c", "bench/gpu/pytest.ini", "--rootdir", ".", "-n", str(jobs), "--timeout", "150", "--durations",
        "10", "--junitxml", f"{{out}}/{name}.xml", *more, *files,
    ]  # fmt: skip


def _tests(group: str, name: str, seconds: int, files: Sequence[str], jobs: int, *more: str) -> Part:
    needs = (*_TEST_MODULES, *(_ENGINE_MODULES if "gpu_worker" in files[0] else ()))
    return Part(group, name, seconds, _pytest(name, files, jobs, *more), needs, ("--collect-only",))


def _bench(group: str, name: str, seconds: int, module: str, *arguments: str, dry: bool = True) -> Part:
    command = [module, *arguments, "--out", f"{{out}}/{name}.json"]
    return Part(group, name, seconds, command, _ENGINE_MODULES, ("--dry",) if dry else None)


def _decode(shape: str, *more: str, name: str = "", batch: str = "1,64,256", dry: bool = False) -> Part:
    command = ["bench.engine.decode_step", "--shape", shape, "--batch", batch, *more]
    return _bench("steps", name or f"step-{shape}", 75, *command, dry=dry)


def _offline(shape: str, workload: str, *more: str, name: str = "", dry: bool = False) -> Part:
    name = name or f"offline-{workload}-{shape}"
    return _bench(
        "offline", name, 120, "bench.engine.offline", "--shape", shape, "--workload", workload, *more, dry=dry
    )


def _sanitizer(tool: str, file: str, chosen: str) -> Part:
    command = [
        "/compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "{python}", "-m", "pytest", "-c",
        "bench/gpu/pytest.ini", "--rootdir", ".", "-x", "-p", "no:xdist", file, "-k", chosen,
    ]  # fmt: skip
    return Part("sanitize", f"{tool}-{Path(file).stem}", 75, command, _TEST_MODULES, None)


STAGES: list[list[Part]] = [
    # A wrong kernel is told within a minute: some tests of most files.
    [_tests("smoke", "smoke", 75, [
        "tests/kernels/launched/test_attention.py::test_decode_over_page_sizes",
        "tests/kernels/launched/test_attention.py::test_prefill_over_page_sizes",
        "tests/kernels/launched/test_sampling.py::test_draws_equal_the_reference",
        "tests/kernels/launched/test_experts.py::test_grouped_products",
        "tests/kernels/launched/test_scan.py", "tests/kernels/launched/test_nibbles.py",
        "tests/kernels/launched/test_codes.py",
    ], 8, "--maxfail", "1")],
    [
        _tests("tests", "tests-kernels", 280, _LAUNCHED, 9),
        _tests("tests", "tests-engine", 280, ["tests/gpu_worker/cuda"], 5, "-m", "gpu and not long"),
        *(
            Part("tests", f"precompile-{shape}", 240, ["bench.gpu.precompile", "--shape", shape], _ENGINE_MODULES, None)
            for shape in ("qwen3-0.6b", "llama-3.1-8b")
        ),
    ],
    [Part("kernels", "kernels", 150, ["bench.kernels", "--out", "{out}/kernels.json"])],
    [_decode("qwen3-0.6b", dry=True)],
    [_decode("llama-3.1-8b")],
    [_bench("steps", "mixed-qwen3-0.6b", 60, "bench.engine.mixed_step", "--shape", "qwen3-0.6b")],
    [_bench("profile", "profile-qwen3-0.6b", 45, "bench.engine.step_profile", "--shape", "qwen3-0.6b")],
    [_bench("profile", "profile-llama-3.1-8b", 45, "bench.engine.step_profile", "--shape", "llama-3.1-8b", dry=False)],
    *([_decode("llama-3.1-8b", "--quantization", q, name=f"step-llama-3.1-8b-{q}")] for q in ("int4", "fp8")),
    [_decode("qwen3-30b-a3b", batch="1,64")],
    [Part("served", "served", 150, ["bench.gpu.serve", "--shape", "qwen3-0.6b", "--out", "{out}"], _SERVER_MODULES)],
    [_offline("qwen3-0.6b", "uniform", dry=True)],
    [_offline("qwen3-8b", "1024x1024")],
    [_offline("qwen3-8b", "1024x1024", "--kv-cache-dtype", "fp8_e4m3", name="offline-1024x1024-qwen3-8b-kv-fp8_e4m3")],
    [_offline("qwen3-8b", "1024x1024", "--kv-cache-dtype", "int8", name="offline-1024x1024-qwen3-8b-kv-int8")],
    [_offline("qwen3-0.6b", "uniform", "--option", f"speculative_config={_NGRAM}",
              name="offline-uniform-qwen3-0.6b-ngram")],
    [_offline("qwen3-8b", "1024x1024", "--option", "host_kv_gib=32", name="offline-1024x1024-qwen3-8b-host-kv")],
    [Part("sweep", "sweep-quantized", 120,
          ["bench.kernels.sweep_quantized", "--out", "{out}/sweep-quantized.json"], dry=None)],
    [Part("sweep", "sweep", 200, ["bench.kernels.sweep", "--out", "{out}/sweep.json"], dry=None)],
    [
        _sanitizer("memcheck", "tests/kernels/launched/test_attention.py", "group_sizes"),
        _sanitizer("memcheck", "tests/kernels/launched/test_experts.py", "grouped_products"),
        _sanitizer("racecheck", "tests/kernels/launched/test_attention.py", "decode_over_page_sizes"),
    ],
    [_tests("families", "tests-families", 500, ["tests/gpu_worker/cuda/test_engine.py"], 12, "-m", "gpu and long")],
]  # fmt: skip
GROUPS = tuple(dict.fromkeys(part.group for stage in STAGES for part in stage))


def filled(word: str, results: Path) -> str:
    """A word of a command with what it stands for. Other braces, as of JSON, stay."""
    return word.replace("{out}", str(results)).replace("{python}", sys.executable)


class Run:
    """One run: where its results go, and when it must end."""

    def __init__(self, results: Path, limit: float, dry: bool) -> None:
        self._results = results
        self._dry = dry
        self._ends = time.monotonic() + limit
        self.failed: list[str] = []

    def stage(self, parts: Sequence[Part]) -> None:
        """Run parts side by side, to the end of all."""
        running = [(part, process, time.monotonic()) for part in parts if (process := self._begin(part))]
        for part, process, began in running:
            limit = min(part.seconds * (6 if self._dry else 1), self._ends - began)
            self._end(part, process, began, limit)

    def _begin(self, part: Part) -> subprocess.Popen[bytes] | None:
        code = self._results / f"{part.name}.code"
        if code.exists() and code.read_text() == "0":
            print(f"== {part.name}: done before", flush=True)
            return None
        if missing := [module for module in part.needs if importlib.util.find_spec(module) is None]:
            print(f"== {part.name}: left out, this Python lacks: {' '.join(missing)}", flush=True)
            return None
        if self._ends - time.monotonic() < _LEAST_SECONDS:
            print(f"== {part.name}: left out, the time is over", flush=True)
            self.failed.append(part.name)
            return None
        words = [filled(word, self._results) for word in part.command]
        if words[0].startswith("/"):
            command = [words[0][1:], *words[1:]]
            if shutil.which(command[0]) is None:
                print(f"== {part.name}: left out, there is no {command[0]}", flush=True)
                return None
        else:
            command = [sys.executable, "-m", *words]
        environment = dict(os.environ)
        if self._dry and words[0] == "pytest":
            environment["TRITON_INTERPRET"] = "1"  # else the kernels' tests cannot be collected without a GPU
        with (self._results / f"{part.name}.log").open("wb") as log:
            return subprocess.Popen(
                command + list((part.dry or ()) if self._dry else ()),
                cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _end(self, part: Part, process: subprocess.Popen[bytes], began: float, limit: float) -> None:
        try:
            code = process.wait(max(0.0, began + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        (self._results / f"{part.name}.code").write_text(str(code))
        lines = (self._results / f"{part.name}.log").read_text(errors="replace").splitlines()
        print("\n".join(lines[-8 if code == 0 else -40 :]))
        print(f"== {part.name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
        if code != 0:
            self.failed.append(part.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was chosen; 0 if all of it ended with 0."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument(
        "--only", default="", metavar="GROUP,GROUP", help=f"of {', '.join(GROUPS)}; default: all but families"
    )
    parser.add_argument("results", nargs="?", type=Path, help="folder for the results")
    args = parser.parse_args(argv)
    groups = args.only.split(",") if args.only else [group for group in GROUPS if group != "families"]
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    results = (args.results or ROOT / "bench" / "results" / time.strftime("gpu-%Y%m%d-%H%M%S")).resolve()
    results.mkdir(parents=True, exist_ok=True)
    run = Run(results, float(os.environ.get("LIMIT", "3600" if args.dry else "540")), args.dry)
    for stage in STAGES:
        parts = [part for part in stage if part.group in groups and not (args.dry and part.dry is None)]
        run.stage(parts)
        if run.failed == ["smoke"] and not args.dry:
            break  # what is wrong at once would only take the time of the others
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    (results / "commit.txt").write_text(commit.stdout or "no commit: this is no checkout\n")
    table = subprocess.run(
        [sys.executable, "-m", "bench.gpu.table", results], cwd=ROOT, capture_output=True, text=True, check=False
    )
    (results / "table.txt").write_text(table.stdout)
    print(table.stdout + table.stderr, end="")
    if table.returncode:
        run.failed.append("table")
    archive = Path(os.environ.get("ARCHIVE", results / "results.tar.gz"))
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as tar:
        for path in sorted(results.iterdir()):
            if path not in (archive, partial):
                tar.add(path, path.name)
    partial.rename(archive)
    print(f"results in {results}")
    if run.failed:
        print("FAILED:", *run.failed)
    return bool(run.failed)


if __name__ == "__main__":
    sys.exit(main())
