"""What every system is asked to do, and the figures that come of it.

All requests are token ids drawn from one seed, greedy, with the end of text ignored; each workload has its own seed, so
that no prompt comes twice and only the shared prefix can be found in a cache.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.peers.systems import Run
from penstock.bench.load.job import Outcome
from penstock.bench.load.report import summarize
from penstock.bench.load.workload import draw


class Sizes(NamedTuple):
    """How much of everything; lengths in tokens."""

    batches: tuple[int, ...] = (1, 4, 16)
    decode_prompt: int = 128
    decode_output: int = 97
    prefill: int = 1024
    num_prefills: int = 3
    mixed_requests: int = 32
    mixed_prompt: tuple[int, int] = (32, 512)
    mixed_output: tuple[int, int] = (16, 256)
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    sweep_prompt: int = 32
    sweep_output: int = 32
    chat_requests: int = 32
    chat_concurrency: int = 8
    chat_prefix: int = 512
    chat_prompt: tuple[int, int] = (544, 640)
    chat_output: tuple[int, int] = (16, 64)


QUICK = Sizes(
    batches=(1, 4, 16),
    decode_output=33,
    num_prefills=1,
    mixed_requests=8,
    mixed_output=(16, 64),
    concurrencies=(1, 8, 64),
    sweep_prompt=16,
    sweep_output=12,
    chat_requests=8,
    chat_concurrency=4,
    chat_output=(8, 16),
)

Figures = dict[str, float]
Table = dict[str, Figures]
"""Figures by workload (`decode 4`, `prefill`, …) and by what was measured (`step_ms`, …)."""


class WorkloadFailed(Exception):
    """A system did not answer all of a workload's requests."""


def measure_raw(
    run: Run, vocabulary: Sequence[int], sizes: Sizes, seed: int, found: Table, *, with_sweep: bool
) -> None:
    """Everything that is compared with the prefix cache off, into `found`; `seed` differs from round to round.

    Raises:
        WorkloadFailed: naming the workload.
    """
    ask = _Asker(run, vocabulary, seed)
    ask("warm-up", max(sizes.batches), sizes.decode_prompt, 8)
    for batch in sizes.batches:
        outcomes = ask(f"decode {batch}", batch, sizes.decode_prompt, sizes.decode_output)
        found[f"decode {batch}"] = {"step_ms": 1e3 * step_seconds(outcomes)}
    prefills = [ask(f"prefill {i}", 1, sizes.prefill, 1)[0] for i in range(sizes.num_prefills)]
    found["prefill"] = {"tokens_per_s": sizes.prefill / statistics.median(outcome.ttft for outcome in prefills)}
    found["mixed"] = _served(ask("mixed", sizes.mixed_requests, sizes.mixed_prompt, sizes.mixed_output))
    for concurrency in sizes.concurrencies if with_sweep else ():
        num_requests = 2 * concurrency if concurrency < 8 else concurrency
        name = f"concurrency {concurrency}"
        found[name] = _served(ask(name, num_requests, sizes.sweep_prompt, sizes.sweep_output, concurrency))


def measure_chat(run: Run, vocabulary: Sequence[int], sizes: Sizes, seed: int, found: Table) -> None:
    """Requests that begin with the same long prefix, as chats with one system prompt do, into `found`; the cache is on.

    Raises:
        WorkloadFailed: if a request fails.
    """
    ask = _Asker(run, vocabulary, seed)
    ask("chat warm-up", 2, sizes.chat_prompt, 8)
    shared = sizes.chat_prefix
    outcomes = ask("chat", sizes.chat_requests, sizes.chat_prompt, sizes.chat_output, sizes.chat_concurrency, shared)
    found["chat"] = _served(outcomes) | {"ttft_ms": 1e3 * statistics.median(outcome.ttft for outcome in outcomes)}


class _Asker:
    """Draws a workload, sends it and sees that every answer came whole."""

    def __init__(self, run: Run, vocabulary: Sequence[int], seed: int) -> None:
        self._run, self._vocabulary, self._seed = run, vocabulary, seed

    def __call__(
        self,
        name: str,
        num_requests: int,
        prompt: int | tuple[int, int],
        output: int | tuple[int, int],
        concurrency: int = 0,
        shared: int = 0,
    ) -> list[Outcome]:
        self._seed += 1
        requests = draw(num_requests, _range(prompt), _range(output), 0.0, self._vocabulary, shared, self._seed)
        outcomes = self._run(requests, concurrency)
        for outcome, request in zip(outcomes, requests, strict=True):
            if outcome.error:
                raise WorkloadFailed(f"{name}: {outcome.error}")
            if outcome.num_output_tokens != request.max_tokens:
                wrong = f"{outcome.num_output_tokens} of {request.max_tokens} tokens ({outcome.finish_reason})"
                raise WorkloadFailed(f"{name}: an answer has {wrong}")
        return outcomes


def step_seconds(outcomes: Sequence[Outcome]) -> float:
    """Seconds per decode step, of requests that were sent at once.

    Counted while all of them stream: from the first token of the last to the last token of the first. Where a server
    sends several tokens in one piece, a piece counts as many steps.

    Raises:
        WorkloadFailed: if they never streamed all at once.
    """
    found = []
    arrivals = [list(itertools.accumulate([outcome.start + outcome.ttft, *outcome.gaps])) for outcome in outcomes]
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    for times, outcome in zip(arrivals, outcomes, strict=True):
        inside = [moment for moment in times if begin <= moment <= end]
        if len(inside) > 1:
            tokens_per_arrival = (outcome.num_output_tokens - 1) / (len(times) - 1)
            found.append((inside[-1] - inside[0]) / (len(inside) - 1) / tokens_per_arrival)
    if not found:
        raise WorkloadFailed("the requests never streamed all at once")
    return statistics.median(found)


def _served(outcomes: Sequence[Outcome]) -> Figures:
    summary: dict[str, Any] = summarize(outcomes)
    return {
        "tokens_per_s": summary["output_tokens_per_s"],
        "itl_mean_ms": summary["itl_ms"]["mean"],
        "itl_p50_ms": summary["itl_ms"]["p50"],
        "itl_p99_ms": summary["itl_ms"]["p99"],
    }


def _range(length: int | tuple[int, int]) -> tuple[int, int]:
    return length if isinstance(length, tuple) else (length, length)


def decode_bytes(sizes: Sizes, count: Callable[[int, float], float]) -> Mapping[str, float]:
    """What each decode workload's step must read; `count` takes rows and mean context."""
    context = sizes.decode_prompt + sizes.decode_output / 2
    return {f"decode {batch}": count(batch, context) for batch in sizes.batches}
