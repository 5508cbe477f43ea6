"""A conversation with a model whose layers keep states: what each turn computes, with snapshots of states and without.

    python -m bench.kv.conversation [--shape granite-4.0-h-350m] [--turns 3] [--first 600] [--turn 100] [--answer 64]

Both engines are there from the start and take turns. Random weights; a turn's prompt is all that was said before, and
what is new.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.local_engine import LocalEngine
from bench.shapes_folder import shape_folder
from penstock.ipc.messages import SamplingParams

_PAGE = 16


class Turn(NamedTuple):
    """What came of one."""

    num_prompt: int
    num_cached: int
    first_token_ms: float
    answer: list[int]


def take_turn(engine: LocalEngine, prompt: Sequence[int], num_tokens: int) -> Turn:
    """Ask, and note when the first token came."""
    engine.add(prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0))
    began, first, num_cached = time.perf_counter(), 0.0, 0
    answer: list[int] = []
    while engine.has_work:
        deltas, _, _ = engine.step()
        for delta in deltas:
            if not answer and delta.token_ids:
                first, num_cached = time.perf_counter() - began, delta.num_cached_tokens
            answer += delta.token_ids
    return Turn(len(prompt), num_cached, first * 1e3, answer)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="granite-4.0-h-350m")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--first", type=int, default=600, help="tokens of the first turn's prompt")
    parser.add_argument("--turn", type=int, default=100, help="new tokens of each later one")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    made = {
        name: LocalEngine(
            shape_folder(options.shape), enable_prefix_caching=True, state_snapshots_gib=gib, page_size=_PAGE,
            num_threads=options.num_threads, max_num_seqs=4, cpu_kv_cache_gib=0.25, max_model_len=4096,
        )
        for name, gib in (("with snapshots", 1.0), ("without", 0.0))
    }  # fmt: skip
    rng = random.Random(0)
    found: dict[str, list[list[Turn]]] = {name: [[] for _ in range(options.turns)] for name in made}
    for _ in range(options.rounds):
        said = [
            [rng.randrange(5, 90_000) for _ in range(options.turn if turn else options.first)]
            for turn in range(options.turns)
        ]
        texts: dict[str, list[int]] = {name: [] for name in made}
        for turn, new in enumerate(said):
            for name, engine in made.items():
                texts[name] += new
                told = take_turn(engine, texts[name], options.answer)
                texts[name] += told.answer
                found[name][turn].append(told)
    rows = []
    for turn in range(options.turns):
        kept, computed = found["with snapshots"][turn], found["without"][turn]
        num_before = max(0, kept[0].num_prompt - (options.turn if turn else options.first) - 1)
        row = {
            "turn": turn + 1,
            "prompt": kept[0].num_prompt,
            "computed": kept[0].num_prompt - max(its.num_cached for its in kept),
            "of these, computed before": num_before - min(its.num_cached for its in kept),
            "first token ms": round(statistics.median(its.first_token_ms for its in kept), 1),
            "without snapshots, first token ms": round(statistics.median(its.first_token_ms for its in computed), 1),
        }
        rows.append(row)
        print(" ".join(f"{name}: {value}" for name, value in row.items()), file=sys.stderr)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
