"""Preempted sequences of long context: computed again, swapped to the host's memory and back, or as `auto` decides.

    python -m bench.kv.tiers [--shape llama-tiny] [--prompt 1024] [--seqs 6] [--rounds 3] [--slow-us 0]

All sequences are there from the start, in a pool that has room for the prompts of two and not for their outputs: one of
them is preempted while the other grows. The kinds take turns within each round. `--slow-us` lets each page's copy take
so much longer, as over a slow bus: there is a point beyond which computing is quicker, and `auto` finds it.
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
from penstock.gpu_worker.devices.device import Mark
from penstock.gpu_worker.state.transfers import Pages, Transfers
from penstock.ipc.messages import SamplingParams

KINDS = ("recompute", "swap", "auto")
_OUTPUTS = 96
_PAGE = 16


class SlowTransfers:
    """Copies that take longer than they need."""

    def __init__(self, transfers: Transfers, us_per_page: float) -> None:
        self._transfers = transfers
        self._seconds = us_per_page / 1e6
        self._num_us = 0

    def to_host(self, src: Pages, dst: Pages) -> None:
        """Like the others', later."""
        self._wait(len(src))
        self._transfers.to_host(src, dst)

    def from_host(self, src: Pages, dst: Pages) -> None:
        """Like the others', later."""
        self._wait(len(src))
        self._transfers.from_host(src, dst)

    def mark(self) -> Mark:
        """The others' mark."""
        return self._transfers.mark()

    def take_times(self) -> tuple[int, int]:
        """With the time that was added."""
        num_pages, num_us = self._transfers.take_times()
        num_us, self._num_us = num_us + self._num_us, 0
        return num_pages, num_us

    def _wait(self, num_pages: int) -> None:
        time.sleep(num_pages * self._seconds)
        self._num_us += int(num_pages * self._seconds * 1e6)


class Outcome(NamedTuple):
    """One kind, one round."""

    seconds: float
    num_preemptions: int
    num_swapped: int
    num_computed: int  # positions
    copy_us_per_page: float


class Bench:
    """An engine for each kind, and the same work for all of them."""

    def __init__(self, shape: str, num_prompt_tokens: int, num_seqs: int, slow_us: float) -> None:
        rng = random.Random(0)
        self._prompts = [[rng.randrange(3, 4_000) for _ in range(num_prompt_tokens)] for _ in range(num_seqs)]
        self._sampling = [SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)] * num_seqs
        pages = -(-num_prompt_tokens // _PAGE)
        self._engines = {kind: self._engine(shape, kind, 2 * pages + 8, slow_us) for kind in KINDS}

    def _engine(self, shape: str, kind: str, num_pages: int, slow_us: float) -> LocalEngine:
        options = {"max_num_seqs": 8, "page_size": _PAGE, "num_pages": num_pages, "host_kv_gib": 2.0}
        engine = LocalEngine(shape_folder(shape), preemption=kind, dtype="float32", **options)
        if slow_us and engine.runner.host_pages is not None:
            host = engine.runner.host_pages
            host.transfers = SlowTransfers(host.transfers, slow_us)
        return engine

    def run(self, kind: str) -> Outcome:
        """All sequences to their end.

        Raises:
            RuntimeError: if nobody was preempted: then there is nothing to compare.
        """
        engine = self._engines[kind]
        totals, tiers = engine.scheduler.totals, engine.scheduler.tier_totals
        before = totals.num_preemptions, tiers.num_swapped_out, _copied(engine), tiers.num_copy_us
        run = engine.run(self._prompts, self._sampling)
        num_preemptions = totals.num_preemptions - before[0]
        if not num_preemptions:
            raise RuntimeError("nobody was preempted")
        num_copied = _copied(engine) - before[2]
        return Outcome(
            run.seconds,
            num_preemptions,
            tiers.num_swapped_out - before[1],
            sum(step.num_tokens for step in run.steps),
            (tiers.num_copy_us - before[3]) / max(1, num_copied),
        )


def _copied(engine: LocalEngine) -> int:
    tiers = engine.scheduler.tier_totals
    return tiers.num_pages_to_host + tiers.num_pages_from_host


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-tiny")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--seqs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow-us", type=float, default=0.0, help="what each page's copy takes longer")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args(argv)
    bench = Bench(args.shape, args.prompt, args.seqs, args.slow_us)
    found: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds + 1):
        for kind in KINDS:
            outcome = bench.run(kind)
            if number:  # the first round is for learning, and for memory that nobody has touched before
                found[kind].append(outcome)
    print(f"{'kind':<12}{'seconds':>9}{'preempted':>11}{'swapped':>9}{'computed':>10}{'copy us/page':>14}")
    for kind, outcomes in found.items():
        middle = Outcome(*map(statistics.median, zip(*outcomes, strict=True)))
        print(
            f"{kind:<12}{middle.seconds:>9.2f}{middle.num_preemptions:>11.0f}{middle.num_swapped:>9.0f}"
            f"{middle.num_computed:>10.0f}{middle.copy_us_per_page:>14.1f}"
        )
    if args.out is not None:
        figures = {kind: [outcome._asdict() for outcome in outcomes] for kind, outcomes in found.items()}
        args.out.write_text(json.dumps(vars(args) | {"out": str(args.out), "figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
