"""`penstock replay`: computes recorded requests of a server again, and compares the results.

penstock replay run.jsonl --max-num-seqs 4      all requests, in other batches
penstock replay run.jsonl --request ID          one request alone
penstock replay run.jsonl --plans               exactly the same steps, in a worker alone
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.config import Config, ConfigError
from penstock.config.parser import Parser
from penstock.ipc.messages import WorkerHello
from penstock.ipc.process import EXIT_CONFIG
from penstock.models.check import check_checkpoint
from penstock.models.finding.located import located
from penstock.models.finding.registry import open_model
from penstock.models.part import check_further
from penstock.parts.recording.reader import Recorded, Recording, Run
from penstock.replay.options import GROUPS, check_plans, replay_config
from penstock.replay.outcome import Outcome, StepOutcome

DIFFERENT = 1

_SYSTEM = ("weights", "kernels", "arithmetic", "dtype", "num_ranks")


def main(argv: Sequence[str] | None = None) -> int:
    """Replay; return the exit code (0: all equal, 1: something differs, 2: it cannot be done)."""
    args = _parser().parse_args(argv)
    try:
        return _replay(args)
    except (ConfigError, msgspec.ValidationError) as error:
        print(f"penstock replay: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130


def _replay(args: argparse.Namespace) -> int:
    recording = Recording.read(args.file)
    runs = [run for run in recording.runs if run.workers]
    if not runs:
        raise ConfigError("nothing was computed in this recording")
    if recording.num_damaged:
        _say(f"{recording.num_damaged} lines cannot be read and are left out")
    run = runs[-1]
    began = time.monotonic()
    requests = _chosen(recording, args.request)
    if args.plans:
        check_plans(run)
        if len(runs) > 1:
            _say(f"of {len(runs)} runs, the last one is replayed")
    config = _checked(replay_config(run, args))
    # torch is slow to import, so errors in the file and the options have been reported before.
    from penstock.in_process import InProcessEngine
    from penstock.options import quiet
    from penstock.replay.plans import PlanReplay
    from penstock.replay.requests import replay_requests

    quiet(config.log.log_level)
    engine = InProcessEngine(config)
    _tell_system(run, engine.hello)
    outcomes: Iterator[Outcome | StepOutcome]
    if args.plans:
        _check_sizes(run.hello(), engine.hello)
        outcomes = PlanReplay(engine, run).steps()
    else:
        outcomes = replay_requests(engine, requests, at_recorded_times=args.at_recorded_times)
    return _report(outcomes, as_json=args.json, began=began)


def _checked(config: Config) -> Config:
    has_weights = config.worker.load_format != "dummy"
    config = located(config, with_weights=has_weights, with_tokenizer=False)
    check_checkpoint(
        open_model(config),
        config.model.model_impl,
        config.worker.quantization,
        with_weights=has_weights,
        with_tokenizer=False,
    )
    check_further(config, with_weights=has_weights, with_tokenizer=False)
    return config


def _chosen(recording: Recording, wanted: str | None) -> list[Recorded]:
    """The requests to compute.

    Raises:
        ConfigError: there is no request of that id, or none that can be computed.
    """
    requests = recording.requests()
    if wanted is not None:
        requests = [request for request in requests if _is_named(request.arrival.id, wanted)]
        if not requests:
            raise ConfigError(f"--request {wanted!r}: the recording has no such request")
    if not any(request.has_tokens for request in requests):
        raise ConfigError(
            "the prompts are needed, and this recording has only their digests: record with --record-prompts"
        )
    return requests


def _is_named(request_id: str, wanted: str) -> bool:
    """Whether `wanted` names an id: as recorded, or only the part that the client saw, with or without chatcmpl-.

    On the wire an id is FRONTEND:NUMBER:ID. It ends with #NUMBER if the request was sent again after a loss.
    """
    seen = request_id.split(":", 2)[-1].partition("#")[0]
    bare = wanted
    for prefix in ("chatcmpl-", "cmpl-", "resp_"):
        bare = bare.removeprefix(prefix)
    return wanted in (request_id, seen) or bare == seen


def _tell_system(run: Run, here: WorkerHello) -> None:
    """Print what differs from the recorded system.

    Raises:
        ConfigError: the model is a different one.
    """
    then = run.hello()
    if then.model_fingerprint != here.model_fingerprint:
        raise ConfigError("this is another model than the recorded one: name that one with --model")
    for name in _SYSTEM:
        was, now = getattr(then, name), getattr(here, name)
        if was != now:
            _say(f"{name} is {now!r} here, and was {was!r}")
    if not here.is_batch_invariant:
        _say(f"the kernels here ({here.kernels}) round differently in batches of other sizes: tokens may differ")


def _check_sizes(then: WorkerHello, here: WorkerHello) -> None:
    for name in ("page_size", "num_pages", "max_num_seqs", "window_groups"):
        was, now = getattr(then, name), getattr(here, name)
        if was != now:
            raise ConfigError(f"--plans needs a worker of the recorded sizes: {name} was {was}, and is {now} here")


def _report(outcomes: Iterator[Outcome | StepOutcome], *, as_json: bool, began: float) -> int:
    verdicts = {"equal": 0, "differs": 0, "skipped": 0}
    for outcome in outcomes:
        sentence = outcome.sentence
        verdicts[sentence.split(maxsplit=1)[0]] += 1
        print(msgspec.json.encode(outcome).decode() if as_json else sentence, flush=True)
    told = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items())
    _say(f"{told}; {time.monotonic() - began:.1f} s")
    if not verdicts["equal"] + verdicts["differs"]:
        _say("nothing could be compared")
        return EXIT_CONFIG
    return DIFFERENT if verdicts["differs"] else 0


def _say(sentence: str) -> None:
    print(f"penstock replay: {sentence}", file=sys.stderr, flush=True)


def _parser() -> Parser:
    parser = Parser(
        "penstock replay",
        "Compute what a server recorded again, and compare the outputs token for token. Exit code 1: they differ.",
        epilog="Options that are not given are those of the recording.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what `penstock serve --record FILE` has written")
    parser.add_argument("--request", metavar="ID", help="only this request, alone")
    parser.add_argument(
        "--at-recorded-times", action="store_true", help="let requests come when they came, not as fast as possible"
    )
    parser.add_argument("--plans", action="store_true", help="compute the recorded steps, each exactly as it was")
    parser.add_argument("--json", action="store_true", help="one JSON object for each outcome")
    parser.add_flags(GROUPS, has_variables=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
