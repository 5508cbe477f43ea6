"""What guesses are worth: decoding with and without them, taking turns in one run.

    python -m bench.speculation.lookup [--shape NAME] [--speculative-config JSON] [--out FILE.json]

The model quotes (`bench/speculation/quoting.py`): its weights are made so that its text is known beforehand, and a
step costs what any weights of the shape cost. Three workloads. `quoting`: a summary in the words of the prompt, one
row. `unknown`: nothing of the answer was there before, so nothing is guessed. `misleading`: each pair of tokens was
there before, with something else behind it, so every guess is wrong. Times are from each request's first token to its
last one; all requests of a round begin together, and both engines take turns of a quarter of a second. Every answer is
checked. `cpu` is the ratio by the processor time of the worker's thread, which can be trusted on a busy machine too, if
there is one thread.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.local_engine import LocalEngine
from bench.machine import command, commit, machine
from bench.shapes_folder import described
from bench.speculation.quoting import Asked, make_checkpoint, make_draft, misleading, quoting, unknown
from penstock.ipc.messages import SamplingParams
from penstock.kernels.native.build import cache_folder

WORKLOADS: dict[str, tuple[Callable[[int, int, int, int], Asked], tuple[int, ...]]] = {
    "quoting": (quoting, (1,)),
    "unknown": (unknown, (1, 4, 16)),
    "misleading": (misleading, (1, 4, 16)),
}
_PROMPT = 1024  # tokens at least
_TURN = 0.25  # seconds


class Decoded(NamedTuple):
    """From when all requests have a token until all are at their end."""

    seconds: float
    thread_seconds: float  # of the processor
    num_tokens: int
    num_steps: int


class Decoding:
    """Requests that one engine computes, a turn at a time."""

    def __init__(self, engine: LocalEngine, asked: Sequence[Asked]) -> None:
        """Begin all of them, and run until each has a token."""
        sampling = [SamplingParams(max_tokens=len(each.answer), temperature=0.0) for each in asked]
        self._engine, self._asked = engine, asked
        self._names = [engine.add(each.prompt, params) for each, params in zip(asked, sampling, strict=True)]
        self._found = {name: list[int]() for name in self._names}
        self._seconds = self._thread_seconds = 0.0
        self._num_steps = 0
        while not all(self._found.values()):
            self._step()
        self._num_before = sum(map(len, self._found.values()))

    @property
    def has_work(self) -> bool:
        """Whether some answer is not complete."""
        return self._engine.has_work

    def run(self, seconds: float) -> None:
        """Decode for so long, or to the end."""
        began, thread_began = time.perf_counter(), time.thread_time()
        while self._engine.has_work and time.perf_counter() - began < seconds:
            self._step()
            self._num_steps += 1
        self._seconds += time.perf_counter() - began
        self._thread_seconds += time.thread_time() - thread_began

    def result(self) -> Decoded:
        """What all turns took.

        Raises:
            RuntimeError: an answer is not what the model writes.
        """
        if any(self._found[name] != each.answer for name, each in zip(self._names, self._asked, strict=True)):
            raise RuntimeError("an answer is not the text that the model writes")
        num_tokens = sum(map(len, self._found.values())) - self._num_before
        return Decoded(self._seconds, self._thread_seconds, num_tokens, self._num_steps)

    def _step(self) -> None:
        for delta in self._engine.step().deltas:
            self._found[delta.request_id] += delta.token_ids


def decode(engines: Sequence[LocalEngine], asked: Sequence[Asked]) -> list[Decoded]:
    """Let each engine answer the same requests, in short turns: what the machine does meanwhile, it does to all."""
    decodings = [Decoding(engine, asked) for engine in engines]
    order = list(decodings)
    while any(each.has_work for each in order):
        for each in order:
            each.run(_TURN)
        order.reverse()
    return [each.result() for each in decodings]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="a folder name in bench/shapes")
    parser.add_argument("--models", type=Path, default=cache_folder() / "shapes", help="where the checkpoint is made")
    parser.add_argument("--speculative-config", default='{"method": "ngram", "num_speculative_tokens": 8}')
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, separated by commas")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--draft-layers", type=int, default=0, help="guess with a draft model of so many first layers")
    args = parser.parse_args(argv)
    folder = make_checkpoint(args.shape, args.models)
    if args.draft_layers:
        draft = {"method": "draft_model", "model": str(make_draft(folder, args.draft_layers))}
        args.speculative_config = json.dumps(draft | {"num_speculative_tokens": 4})
    vocab_size = described(folder).vocab_size
    length = max(_PROMPT, 4 * args.tokens + 8)
    engines = [
        LocalEngine(
            folder,
            load_format="safetensors",
            device="cpu",
            max_num_seqs=16,
            max_model_len=length + args.tokens + 80,
            num_pages=17 * -(-(length + args.tokens + 80) // 16),
            enable_prefix_caching=True,  # prompts are computed in the first round only
            num_threads=args.threads,
            speculative_config=config,
        )
        for config in ("", args.speculative_config)
    ]
    rows: list[dict[str, Any]] = []
    print(f"{folder.name}, {args.threads} threads, load {machine()['load_before']:.1f}; {args.speculative_config}")
    print(
        f"{'':12} {'rows':>4} {'off, tokens/s':>14} {'on, tokens/s':>14} {'ratio':>6} {'cpu':>6} {'steps a token':>14}"
    )
    for name in args.workloads.split(","):
        make, sizes = WORKLOADS[name]
        for num_rows in sizes:
            asked = [make(vocab_size, args.tokens, _PROMPT, 100 * num_rows + i) for i in range(num_rows)]
            rounds = [decode(engines, asked) for _ in range(1 + args.rounds)][1:]
            off, on = ([each[i] for each in rounds] for i in range(2))
            speed = [statistics.median(run.num_tokens / run.seconds for run in each) for each in (off, on)]
            steps = sum(run.num_steps for run in on) / (sum(run.num_tokens for run in on) / num_rows)
            ratio = statistics.median(a.seconds / b.seconds for a, b in rounds)
            cpu = statistics.median(a.thread_seconds / b.thread_seconds for a, b in rounds)
            rows.append(
                {
                    "workload": name,
                    "rows": num_rows,
                    "off": speed[0],
                    "on": speed[1],
                    "ratio": ratio,
                    "cpu": cpu,
                    "steps_a_token": steps,
                }
            )
            rows[-1]["each"] = {"off": [run.seconds for run in off], "on": [run.seconds for run in on]}
            ratios = f"{ratio:6.2f} {cpu:6.2f}"
            print(f"{name:12} {num_rows:4} {speed[0]:14.1f} {speed[1]:14.1f} {ratios} {steps:14.2f}", flush=True)
    if args.out:
        record = {"kind": "speculation", "model": folder.name, "commit": commit(), "machine": machine()}
        args.out.write_text(
            json.dumps(record | {"command": command("bench.speculation.lookup", argv), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
