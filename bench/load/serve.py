"""`penstock bench serve`: put load on an OpenAI endpoint and measure what its clients feel.

    penstock bench serve --concurrency 16 --num-requests 200 --input-len 100:1024 --output-len 128
    penstock bench serve --base-url http://localhost:8000/v1 --request-rate 20 --save result.json

Exit code 0 if every request got its whole answer, 1 if some failed, 2 if the load could not start.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from penstock.bench.load.job import Job, Outcome
from penstock.bench.load.processes import run
from penstock.bench.load.report import print_summary, summarize
from penstock.bench.load.workload import WorkloadError, draw, harmless_token_ids, served_model
from penstock.config.api_keys import CLIENT_KEY_HELP, client_key
from penstock.config.argument_types import length_range, not_negative, not_negative_float, positive, positive_float
from penstock.config.parser import Parser

EXIT_FAILED = 1
EXIT_CANNOT_START = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load as told on the command line; returns the exit code."""
    options = _parser().parse_args(argv)
    console = Console(stderr=False, soft_wrap=True)
    try:
        if options.save:
            options.save.open("a").close()  # said now, and not after the load
        job = _prepare(options)
        if options.warmup:
            _warm_up(job, options)
        if not options.quiet:
            console.print(_description(options, job))
        outcomes = run(job, _num_processes(options, job))
    except (WorkloadError, RuntimeError, OSError) as error:
        print(f"penstock bench serve: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:
        return EXIT_CANNOT_START
    summary = summarize(outcomes)
    if not options.quiet:
        print_summary(summary, console)
    if options.save:
        saved = {"options": _saved_options(options, job), "summary": summary, "requests": _details(outcomes)}
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
    return EXIT_FAILED if summary["num_failed"] else 0


def _prepare(options: argparse.Namespace) -> Job:
    base_url: str = options.base_url.rstrip("/")
    if not base_url.endswith("/v1"):
        base_url += "/v1"
    model, vocabulary = asyncio.run(_ask_server(base_url, options))
    requests = draw(
        options.num_requests,
        options.input_len,
        options.output_len,
        options.request_rate or 0.0,
        vocabulary,
        options.shared_prefix_len,
        options.seed,
    )
    concurrency = options.concurrency
    if concurrency is None:
        concurrency = 0 if options.request_rate else 16
    return Job(
        base_url=base_url,
        model=model,
        endpoint=options.endpoint,
        requests=requests,
        concurrency=concurrency,
        start_at=0.0,
        api_key=options.api_key,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        token_ids=options.return_token_ids,
        timeout=options.timeout,
    )


def _num_processes(options: argparse.Namespace, job: Job) -> int:
    """As many as wanted, if each gets a request, and may have one in flight."""
    most = min(len(job.requests), job.concurrency or len(job.requests))
    return int(min(options.processes, most))


async def _ask_server(base_url: str, options: argparse.Namespace) -> tuple[str, list[int]]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), headers=headers) as session:
        model = options.model or await served_model(session, base_url)
        wants_ids = options.endpoint == "completions" and not options.text_prompts
        return model, await harmless_token_ids(session, base_url, model) if wants_ids else []


def _warm_up(job: Job, options: argparse.Namespace) -> None:
    """Some requests of the same lengths beforehand, all at once and with other prompts."""
    vocabulary = sorted({i for r in job.requests if isinstance(r.prompt, list) for i in r.prompt})
    requests = draw(options.warmup, options.input_len, options.output_len, 0.0, vocabulary, 0, options.seed + 1)
    outcomes = run(msgspec.structs.replace(job, requests=requests, concurrency=job.concurrency or 16), 1)
    failed = next((outcome.error for outcome in outcomes if outcome.error), None)
    if failed is not None:
        raise WorkloadError(f"a warm-up request failed: {failed}")


def _description(options: argparse.Namespace, job: Job) -> str:
    pace = f"{options.request_rate}/s (Poisson)" if options.request_rate else "as fast as the concurrency allows"
    limit = f"at most {job.concurrency} at once" if job.concurrency else "no limit at once"
    kind = "token ids" if job.requests and isinstance(job.requests[0].prompt, list) else "words"
    return (
        f"{len(job.requests)} requests to {job.base_url} ({job.endpoint}, {job.model}), {pace}, {limit}; "
        f"prompts of {_shown(options.input_len)} {kind}, outputs of {_shown(options.output_len)} tokens"
    )


def _shown(lengths: tuple[int, int]) -> str:
    return str(lengths[0]) if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"


def _saved_options(options: argparse.Namespace, job: Job) -> dict[str, Any]:
    hidden = {"save", "quiet", "api_key"}
    found = {name: value for name, value in vars(options).items() if name not in hidden}
    return found | {"base_url": job.base_url, "model": job.model, "concurrency": job.concurrency}


def _details(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [{f: getattr(outcome, f) for f in outcome.__struct_fields__ if f != "gaps"} for outcome in outcomes]


def _parser() -> Parser:
    parser = Parser("penstock bench serve", "Put load on any OpenAI-compatible endpoint, and measure it.")
    add = parser.add_argument
    add(
        "--base-url",
        default="http://127.0.0.1:8000/v1",
        metavar="URL",
        help="the endpoint; /v1 is added if it is missing",
    )
    add("--model", default="", metavar="NAME", help="(default: the first that the server lists)")
    add("--endpoint", choices=("chat", "completions"), default="completions", help="(default: %(default)s)")
    add("--api-key", default=client_key(), metavar="KEY", help=CLIENT_KEY_HELP)
    add("--num-requests", type=positive, default=100, metavar="N", help="(default: %(default)s)")
    add(
        "--concurrency",
        type=positive,
        metavar="N",
        help="most requests in flight (default: 16, or no limit with a rate)",
    )
    add(
        "--request-rate",
        type=positive_float,
        metavar="RATE",
        help="requests per second with Poisson arrivals (default: closed loop)",
    )
    add("--input-len", type=length_range, default=(128, 128), metavar="N|LOW:HIGH", help="prompt tokens, uniform")
    add("--output-len", type=length_range, default=(128, 128), metavar="N|LOW:HIGH", help="output tokens, uniform")
    add(
        "--shared-prefix-len",
        type=not_negative,
        default=0,
        metavar="N",
        help="the first N prompt tokens are equal in all",
    )
    add("--text-prompts", action="store_true", help="words in place of token ids; chat always uses words")
    add("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and arrivals")
    add("--temperature", type=not_negative_float, default=0.0, metavar="T", help="(default: %(default)s)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="let every answer reach its length")
    add("--return-token-ids", action="store_true", help="count tokens by ids, for servers that send no usage")
    add("--warmup", type=not_negative, default=0, metavar="N", help="requests beforehand that are not measured")
    add(
        "--timeout",
        type=positive_float,
        default=600.0,
        metavar="SECONDS",
        help="for one request (default: %(default)g)",
    )
    add("--processes", type=positive, default=1, metavar="N", help="client processes, for rates beyond one core")
    add("--save", type=Path, metavar="FILE", help="write options, figures and every request's times as JSON")
    add("--quiet", action="store_true", help="print nothing but errors")
    return parser


if __name__ == "__main__":
    sys.exit(main())
