"""How long a decode step takes at a depth, for two shapes in turns: such as with an indexer and without.

    python -m bench.engine.depth FOLDER OTHER --depths 1024,32768 [--threads 2] [--out FILE.json]

Each FOLDER has a config.json; weights are random. A prompt of each depth is computed once, then both engines decode
some tokens in turns. The table has the median step of each, and the median of the ratios of neighbouring turns: below
1, the first one is faster.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.engine.decode_step import decode_times
from bench.engine.offline import fixed, sampling_of
from bench.local_engine import LocalEngine
from bench.machine import command, commit, machine
from bench.shapes_folder import described

_TOKENS = 12
"""Decoded in a turn; the first steps of a turn find cold caches, so a turn's figure is its median."""


def turn(engine: LocalEngine, prompt: Sequence[int]) -> float:
    """Median seconds of a decode step behind a prompt whose pages are cached."""
    return statistics.median(decode_times(engine.run([prompt], sampling_of([_TOKENS])), 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both shapes at each depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs=2, metavar="FOLDER")
    parser.add_argument("--depths", default="1024,32768", help="tokens, separated by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    depths = [int(depth) for depth in args.depths.split(",")]
    longest = max(depths) + _TOKENS + 1
    engines = [
        LocalEngine(
            folder,
            device="cpu",
            num_threads=args.threads,
            max_num_seqs=1,
            max_model_len=longest,
            max_num_batched_tokens=2048,
            num_pages=sum(depths) // 16 + 64,
            enable_prefix_caching=True,
        )
        for folder in args.folders
    ]
    vocabulary = min(described(folder).vocab_size for folder in args.folders)
    rows: list[dict[str, float]] = []
    for depth in depths:
        prompt = [token % vocabulary for token in fixed(depth, 1)[0][0]]
        for engine in engines:
            turn(engine, prompt)
        turns = [[turn(engine, prompt) for engine in engines] for _ in range(args.rounds)]
        ours, others = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
        ratio = statistics.median(one / other for one, other in turns)
        rows.append({"depth": depth, "step_ms": ours, "other_ms": others, "ratio": ratio})
        print(f"depth {depth}: {ours:.2f} ms, {others:.2f} ms, ratio {ratio:.3f}", flush=True)
    if args.out:
        record = {
            "kind": "depth",
            "command": command("bench.engine.depth", argv),
            "commit": commit(),
            "shapes": [folder.name for folder in args.folders],
            "machine": machine(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
