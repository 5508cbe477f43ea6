"""Penstock and its peers as one kind of thing: started with so many threads, given requests, watched token by token."""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.peers.envs import Environment, PeerError, make
from bench.peers.formats import AS_STORED, FORMATS
from bench.peers.model import to_gguf, to_openvino
from bench.server_process import free_port, running, stop
from penstock.bench.load.job import Job, Outcome, PlannedRequest
from penstock.bench.load.processes import run
from penstock.gpu_worker.devices.cpu import computes_in_bf16
from penstock.kernels.native.build import built_library

PENSTOCK = "penstock"
PENSTOCK_BF16 = "penstock-bf16"
"""Penstock with the weights as they are stored: what another format has to be faster than."""
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 2048
_START_SECONDS = 900.0
_NUM_KV_TOKENS = 32768
"""Room in every peer's KV cache: 64 requests of 512 tokens, or 32 of the mixed workload's longest."""

Run = Callable[[Sequence[PlannedRequest], int], list[Outcome]]
"""Sends requests, at most so many at once (0: no limit), and returns what became of them."""


class Started(NamedTuple):
    """A system that is ready."""

    run: Run
    start_seconds: float


class System(NamedTuple):
    """A system that can be started; `command` takes a port and whether prefixes are to be cached."""

    name: str
    how: str  # how it is driven, for the table
    versions: dict[str, str]
    command: Callable[[int, bool], list[str | Path]]
    env: dict[str, str]
    ready_path: str = ""  # empty: in process, over pipes


class Asked(NamedTuple):
    """What all systems are given."""

    checkpoint: Path
    format: str  # one of FORMATS
    envs: Path
    threads: int
    say: Callable[[str], None]

    def gguf(self) -> Path:
        """The file that llama.cpp and Penstock read.

        Raises:
            PeerError: it cannot be made.
        """
        return to_gguf(make("llamacpp", self.envs, self.say), self.checkpoint, FORMATS[self.format].gguf)


def prepare(name: str, asked: Asked, extra: str) -> System:
    """A peer's environment and its form of the checkpoint, or Penstock as it is; `extra` are further flags.

    Raises:
        PeerError: if it cannot be had on this machine.
    """
    flags = shlex.split(extra)
    if name in (PENSTOCK, PENSTOCK_BF16):
        return _penstock(name, asked, flags)
    return _PREPARE[name](make(name, asked.envs, asked.say), asked, flags)


def _penstock(name: str, asked: Asked, flags: list[str]) -> System:
    checkpoint, threads = asked.checkpoint, asked.threads
    its = FORMATS[AS_STORED if name == PENSTOCK_BF16 else asked.format]
    model = checkpoint if its is FORMATS[AS_STORED] or not its.gguf else asked.gguf()
    flags = [*its.penstock, *flags]
    own = ["--num-threads", str(threads), "--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(MAX_MODEL_LEN)]

    def command(port: int, prefix_caching: bool) -> list[str | Path]:
        caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
        serve: list[str | Path] = [
            sys.executable,
            "-m",
            "penstock.cli",
            "serve",
            model,
            "--port",
            str(port),
        ]
        return [*serve, *own, caching, "--served-model-name", checkpoint.name, *flags]

    versions = {"torch": importlib.metadata.version("torch"), "kernels": "native" if built_library() else "torch's"}
    return System(name, "HTTP", versions, command, dict(os.environ), "/ready")


def _vllm(env: Environment, asked: Asked, flags: list[str]) -> System:
    checkpoint, threads = asked.checkpoint, asked.threads
    if not FORMATS[asked.format].vllm:
        raise PeerError(f"vLLM is given the checkpoint as it is stored, not {asked.format}")
    # In bf16 without instructions for it, its steps of four rows and its prefills take four times as long.
    dtype = "bfloat16" if computes_in_bf16() else "float32"
    own = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(MAX_MODEL_LEN), "--dtype", dtype]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(env.folder / "cache"),  # what it compiles at its first start, too
        "HF_HUB_OFFLINE": "1",
    }
    openmp = env.folder / "venv/lib/libiomp5.so"  # comes with its requirements; it asks for this "for best performance"
    if openmp.is_file():
        settings["LD_PRELOAD"] = str(openmp)

    def command(port: int, prefix_caching: bool) -> list[str | Path]:
        caching = "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"
        serve: list[str | Path] = [env.program("vllm"), "serve", checkpoint, "--host", "127.0.0.1", "--port", str(port)]
        return [*serve, *own, caching, "--served-model-name", checkpoint.name, *flags]

    versions = env.versions("vllm", "torch") | {"dtype": dtype}
    return System("vllm", "HTTP", versions, command, _own_environment() | settings, "/health")


def _llamacpp(env: Environment, asked: Asked, flags: list[str]) -> System:
    if not FORMATS[asked.format].gguf:
        raise PeerError(f"a GGUF file has no {asked.format}")
    checkpoint, threads, model = asked.checkpoint, asked.threads, asked.gguf()
    own = ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(MAX_NUM_SEQS)]
    own += ["--ctx-size", str(_NUM_KV_TOKENS), "--kv-unified", "--alias", checkpoint.name, "--host", "127.0.0.1"]

    def command(port: int, prefix_caching: bool) -> list[str | Path]:
        caching = "--cache-prompt" if prefix_caching else "--no-cache-prompt"
        serve: list[str | Path] = [env.program("llama-server"), "--model", model, "--port", str(port)]
        return [*serve, *own, caching, *flags]

    version = next(env.folder.glob("llama_cpp_python-*")).name.rpartition("-")[2]
    return System("llamacpp", "HTTP", {"llama-cpp-python": version}, command, _own_environment(), "/health")


def _openvino(env: Environment, asked: Asked, flags: list[str]) -> System:
    if flags:
        raise PeerError("OpenVINO runs in process and takes no flags")
    weights = FORMATS[asked.format].openvino
    if not weights:
        raise PeerError(f"OpenVINO has no {asked.format}")
    model = to_openvino(env, asked.checkpoint, weights)
    script = Path(__file__).with_name("run_openvino.py")
    sizes = [str(asked.threads), str(MAX_NUM_SEQS), str(_NUM_KV_TOKENS)]

    def command(port: int, prefix_caching: bool) -> list[str | Path]:
        return [env.python, script, model, *sizes, str(int(prefix_caching))]

    versions = env.versions("openvino", "openvino-genai", "optimum-intel")
    return System("openvino", "in process", versions, command, _own_environment())


_PREPARE: Mapping[str, Callable[[Environment, Asked, list[str]], System]] = {
    "vllm": _vllm,
    "openvino": _openvino,
    "llamacpp": _llamacpp,
}


def _own_environment() -> dict[str, str]:
    """This process's variables without those that would lead a peer to our packages or change its threads."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in left_out}


@contextmanager
def started(system: System, model: str, prefix_caching: bool, log: Path) -> Iterator[Started]:
    """The system, ready; it has ended when the context has.

    Raises:
        RuntimeError: if it does not start.
    """
    port = free_port()
    command = system.command(port, prefix_caching)
    if not system.ready_path:
        with _in_process(command, system.env, log) as ready:
            yield ready
        return
    url = f"http://127.0.0.1:{port}"
    with running(command, url + system.ready_path, system.env, _START_SECONDS, log) as seconds:

        def over_http(requests: Sequence[PlannedRequest], concurrency: int) -> list[Outcome]:
            job = Job(
                f"{url}/v1",
                model,
                "completions",
                list(requests),
                concurrency,
                start_at=0.0,
                timeout=1800.0,
                reuses_connections=False,  # llama.cpp closes some just when a request comes on them
            )
            return run(job, 1)

        yield Started(over_http, seconds)


@contextmanager
def _in_process(command: Sequence[str | Path], env: Mapping[str, str], log: Path) -> Iterator[Started]:
    import time

    began = time.monotonic()
    with log.open("wb") as told:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, start_new_session=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    to_it, from_it = process.stdin, process.stdout

    def line() -> bytes:
        found = from_it.readline()
        if not found:
            last = "\n    ".join(log.read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"it ended with code {process.wait()} (all it said is in {log}):\n    {last}")
        return found

    def over_pipes(requests: Sequence[PlannedRequest], concurrency: int) -> list[Outcome]:
        asked = [(each.arrival, each.prompt, each.max_tokens) for each in requests]
        to_it.write(msgspec.json.encode({"concurrency": concurrency, "requests": asked}) + b"\n")
        to_it.flush()
        return [
            outcome_of(start, arrivals, request)
            for (start, arrivals), request in zip(json.loads(line()), requests, strict=True)
        ]

    try:
        line()  # `ready`
        yield Started(over_pipes, time.monotonic() - began)
    finally:
        stop(process)
        to_it.close()
        from_it.close()


def outcome_of(start: float, arrivals: Sequence[tuple[float, int]], request: PlannedRequest) -> Outcome:
    """One request that ran in process, told as the HTTP client tells it. Times in seconds."""
    times = [moment for moment, _ in arrivals]
    return Outcome(
        start=start,
        ttft=times[0] - start,
        e2e=times[-1] - start,
        gaps=[later - earlier for earlier, later in pairwise(times)],
        num_prompt_tokens=len(request.prompt),
        num_output_tokens=sum(count for _, count in arrivals),
        finish_reason="length",
    )
