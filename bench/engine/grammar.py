"""What one row that follows a grammar costs its neighbours: decode steps of 16 rows, with and without such a row.

    python -m bench.engine.grammar [--model FOLDER] [--device cpu|cuda] [--out FILE.json]

Fifteen rows are free. The sixteenth is free too, or writes JSON under a schema with nested objects, arrays, enums
and patterns. Both kinds take turns, so that a machine's moods meet both. `step_ms` is wall time, median over steps.
`thread_ms` is the processor time that the worker's own thread spends on a step: what the neighbours wait for where a
core is free to fill masks; it can be trusted on a busy machine too.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine.decode_step import decode_times
from bench.local_engine import LocalEngine
from penstock.frontend.grammars.child import read_grammar
from penstock.ipc.messages import SamplingParams
from penstock.models.finding.registry import demo_path, open_checkpoint
from penstock.models.grammar_tokens import grammar_vocabulary

_NUM_FREE = 15
_ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 30},
        "kind": {"enum": ["pipe", "gate", "wheel"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "size": {"type": "number", "minimum": 0, "maximum": 1000},
        "parts": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5},
    },
    "required": ["name", "kind", "code", "size", "parts"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _ITEM, "minItems": 100, "maxItems": 200}
"""No text that is measured comes to its end."""


class Times(NamedTuple):
    """Seconds of one run's steps."""

    steps: list[float]
    thread: float  # per step


def step_times(engine: LocalEngine, grammar: str, num_steps: int, stop_token_ids: tuple[int, ...]) -> Times:
    """Let 16 rows decode; with a grammar for the last one, unless it is empty."""
    prompts = [[5 + i, 6, 7, 8] for i in range(_NUM_FREE + 1)]
    sampling = [SamplingParams(max_tokens=num_steps, temperature=1.0, seed=i) for i in range(_NUM_FREE)]
    last = SamplingParams(max_tokens=num_steps, temperature=1.0, seed=99, grammar=grammar)
    if grammar:
        last = SamplingParams(
            max_tokens=num_steps, temperature=1.0, seed=99, grammar=grammar, stop_token_ids=stop_token_ids
        )
    began = time.thread_time()
    run = engine.run(prompts, [*sampling, last])
    return Times(decode_times(run, _NUM_FREE + 1), (time.thread_time() - began) / len(run.steps))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder with a tokenizer (default: the demo model)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=200, help="per round")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    folder = args.model or demo_path("model")
    vocabulary = grammar_vocabulary(open_checkpoint(folder))
    grammar = read_grammar(vocabulary, "json", json.dumps(_SCHEMA)).text
    engine = LocalEngine(
        folder,
        device=args.device,
        max_num_seqs=_NUM_FREE + 1,
        max_num_batched_tokens=1024,
        max_model_len=args.steps + 16,
        num_pages=0 if args.device.startswith("cuda") else 2 * (_NUM_FREE + 1) * (args.steps // 16 + 2),
    )
    eos = (vocabulary.eos_token,)
    for each in ("", grammar):
        step_times(engine, each, 20, eos)  # warm
    rounds = [[step_times(engine, each, args.steps, eos) for each in ("", grammar)] for _ in range(args.rounds)]
    free, constrained = ([pair[i] for pair in rounds] for i in range(2))
    step_ms = [statistics.median(step for times in kind for step in times.steps) * 1e3 for kind in (free, constrained)]
    thread_ms = [statistics.median(times.thread for times in kind) * 1e3 for kind in (free, constrained)]
    record = {
        "kind": "grammar",
        "model": folder.name,
        "device": engine.hello.device,
        "num_free_rows": _NUM_FREE,
        "num_steps": sum(len(times.steps) for times in free),
        "step_ms": {"free": round(step_ms[0], 4), "grammar": round(step_ms[1], 4)},
        "thread_ms": {"free": round(thread_ms[0], 4), "grammar": round(thread_ms[1], 4)},
        "step_slowdown": round(step_ms[1] / step_ms[0] - 1, 4),
        "thread_slowdown": round(thread_ms[1] / thread_ms[0] - 1, 4),
    }
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
