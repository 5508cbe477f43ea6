"""`penstock simulate`: what users would feel under other options, by the real scheduler in virtual time.

penstock simulate bench/shapes/llama-3.1-8b --gpu h100 --request-rate 12
penstock simulate --measured run.jsonl --config 'now:' --config 'sjf: --scheduling-policy sjf'
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from penstock.config import Config, ConfigError
from penstock.config.argument_types import (
    length_range,
    not_negative,
    not_negative_float,
    positive,
    positive_float,
    share,
)
from penstock.config.flags import Flag, config_from, flags
from penstock.config.parser import Parser
from penstock.core.scheduling.part import check_options
from penstock.ipc.process import EXIT_CONFIG
from penstock.lab.commands.plan import read_decoder
from penstock.lab.planning.costs import BYTES, Costs
from penstock.lab.planning.machines import load_machines
from penstock.lab.planning.plan import Layout, Plan
from penstock.lab.simulation import arrivals as loads
from penstock.lab.simulation.figures import curves
from penstock.lab.simulation.plot import check_plot, draw
from penstock.lab.simulation.simulator import StuckError
from penstock.lab.simulation.study import Load, Machine, Measured, Result, compare, measured, planned_machine
from penstock.parts.batching.options import BatchingOptions
from penstock.parts.host.options import HostOptions
from penstock.parts.policies.options import PolicyOptions
from penstock.parts.policies.scheduler.registry import POLICIES
from penstock.parts.recording.options import RecordingOptions

_GROUPS = ("scheduler", "worker", "model")
_WHOLE = ("scheduler", HostOptions.part, PolicyOptions.part, BatchingOptions.part)
"""Groups of options that a simulation honours."""

_BESIDE = {"max_model_len", "num_pages", "step_trace"}
"""Options outside of these groups that a simulation honours."""

_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("TTFT p50, ms", ("ttft_ms", "p50"), "{:,.1f}"),
    ("TTFT p99, ms", ("ttft_ms", "p99"), "{:,.1f}"),
    ("TPOT p50, ms", ("tpot_ms", "p50"), "{:,.2f}"),
    ("TPOT p99, ms", ("tpot_ms", "p99"), "{:,.2f}"),
    ("E2E p50, ms", ("e2e_ms", "p50"), "{:,.1f}"),
    ("E2E p99, ms", ("e2e_ms", "p99"), "{:,.1f}"),
    ("requests/s", ("requests_per_s",), "{:,.2f}"),
    ("output tokens/s", ("output_tokens_per_s",), "{:,.1f}"),
    ("goodput, requests/s", ("goodput_per_s",), "{:,.2f}"),
    ("goodput, share", ("goodput",), "{:.1%}"),
    ("fairness (Jain)", ("fairness",), "{:.3f}"),
    ("refused or failed", ("num_failed",), "{:,}"),
    ("preemptions", ("num_preemptions",), "{:,}"),
    ("prefix hits", ("hit_rate",), "{:.1%}"),
    ("pages used, mean", ("pages_used", "mean"), "{:,.0f}"),
    ("pages used, most", ("pages_used", "max"), "{:,}"),
    ("device busy", ("busy",), "{:.1%}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a comparison; return the exit code (1: requests never end, 2: the options cannot work)."""
    args = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        if args.plot is not None:
            check_plot(args.plot)
        known = measured(args.measured) if args.measured is not None else None
        machine = _machine(args, known)
        load = _load(args, known)
        configs = _configs(args)
        if args.save_load is not None:
            loads.write(args.save_load, load.arrivals)
        with console.status("") as status:
            results = compare(machine, load, configs, lambda result: status.update(f"{result.name} is done"))
        if args.plot is not None:
            draw(results, args.plot, f"{machine.name}: {len(load.arrivals):,} requests")
    except (ConfigError, OSError) as error:
        print(f"penstock simulate: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except StuckError as error:
        print(f"penstock simulate: {error}", file=sys.stderr)
        return 1
    if args.served:
        drawn = {result.name: curves(result.run) for result in results}
        print(json.dumps(_told(machine, load, results) | {"curves": drawn}))
    elif args.json:
        print(json.dumps(_told(machine, load, results), indent=2))
    else:
        _print(console, machine, load, results)
    return 0


def _machine(args: argparse.Namespace, known: Measured | None) -> Machine:
    if known is not None:
        if args.model is not None:
            raise ConfigError("a MODEL on a --gpu or a --measured run: one of the two")
        machine = known.machine
    elif args.model is None:
        raise ConfigError("say which MODEL on which --gpu, or a --measured run")
    else:
        machines = load_machines(args.machines)
        if args.gpu not in machines:
            raise ConfigError(f"--gpu {args.gpu} is not known: there are {', '.join(machines)}; --machines adds others")
        costs = Costs(read_decoder(args.model), args.weights, args.kv)
        machine = planned_machine(Plan(costs, machines[args.gpu], Layout(args.tp, args.pp)), args.efficiency)
    given = {"request": args.request_ms, "reply": args.reply_ms}
    if args.copy_gbps is not None:
        machine = machine._replace(copy_speed=1e9 * args.copy_gbps)
    return machine._replace(
        timing=replace(machine.timing, **{name: ms / 1e3 for name, ms in given.items() if ms is not None})
    )


def _load(args: argparse.Namespace, known: Measured | None) -> Load:
    page_size = 16 if known is None else known.page_size
    if args.load is not None:
        arrivals = loads.read(args.load)
    elif args.request_rate is None and known is not None:
        if not known.arrivals:
            raise ConfigError(f"{args.measured} shows no requests; --request-rate and --load give others")
        arrivals = known.arrivals
    else:
        bursts = loads.Bursts(rate=args.request_rate or float("inf"), burstiness=args.burstiness, on_off=args.on_off)
        shape = loads.Shape(
            input_len=args.input_len,
            output_len=args.output_len,
            prefix_len=args.shared_prefix_len,
            num_prefixes=args.num_prefixes,
            num_keys=args.num_keys,
        )
        arrivals = loads.draw(args.num_requests, bursts, shape, args.seed)
    if args.speed != 1.0:
        arrivals = [replace(each, time=each.time / args.speed) for each in arrivals]
    return Load(arrivals, loads.Targets(args.ttft or 0.0, args.tpot or 0.0), page_size, args.seed)


def _configs(args: argparse.Namespace) -> dict[str, Config]:
    """Return each configuration's options: those for all, then its own."""
    parser = Parser("penstock simulate --config", "", add_help=False, exit_on_error=False)
    parser.add_flags(_GROUPS, _is_simulated)
    known = [flag for flag in flags(_GROUPS) if _is_simulated(flag)]
    common = {flag.field: getattr(args, flag.field) for flag in known if hasattr(args, flag.field)}
    found: dict[str, Config] = {}
    for text in args.config or ["server:"]:
        name, colon, words = text.partition(":")
        if not colon or name.strip().startswith("-"):
            name, words = text, text
        try:
            own, unknown = parser.parse_known_args(shlex.split(words))
        except (argparse.ArgumentError, ValueError) as error:
            raise ConfigError(f"--config {text!r}: {error}") from None
        if unknown:
            raise ConfigError(f"--config {text!r}: {parser.surplus(unknown)}")
        config = config_from(argparse.Namespace(**common | vars(own)), os.environ)
        if args.served:
            _check_served(config)
        check_options(config)
        if name.strip() in found:
            raise ConfigError(f"two configurations are called {name.strip()!r}")
        found[name.strip()] = config
    return found


def _check_served(config: Config) -> None:
    """Refuse what other people's options may not do here: write files and run modules."""
    if config.of(RecordingOptions).step_trace:
        raise ConfigError("--step-trace writes a file, which a simulation on a server may not")
    if config.of(PolicyOptions).scheduling_policy not in POLICIES:
        raise ConfigError(f"--scheduling-policy must be {', '.join(POLICIES)} in a simulation on a server")


def _is_simulated(flag: Flag) -> bool:
    return flag.group in _WHOLE or flag.field in _BESIDE


def _told(machine: Machine, load: Load, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "machine": {
            "name": machine.name,
            "num_slots": machine.num_slots,
            "max_model_len": machine.max_model_len,
            "timing": to_builtins(machine.timing),
        },
        "load": loads.described(load.arrivals),
        "targets": load.targets._asdict(),
        "configs": {result.name: result.figures for result in results},
    }


def _print(console: Console, machine: Machine, load: Load, results: Sequence[Result]) -> None:
    about = loads.described(load.arrivals)
    console.print(
        f"{machine.name}: {about['num_requests']:,} requests in {about['seconds']:,.1f} s, "
        f"{about['num_prompt_tokens']:,} prompt tokens, {about['num_output_tokens']:,} output tokens\n"
    )
    wide = Console(highlight=False, width=max(console.width, 24 + sum(2 + max(11, len(each.name)) for each in results)))
    wide.print(_table(results))
    for result in results:
        for error, count in result.figures["errors"].items():
            console.print(f"{result.name}: {count:,} x {error}")


def _parser() -> Parser:
    parser = Parser(
        "penstock simulate",
        "What users would feel under other options: the server's own scheduler in virtual time, against a "
        "model of the device. Its options apply to all configurations; --config adds one with options of its own.",
    )
    _add_machine(parser.add_argument_group("machine"))
    _add_load(parser.add_argument_group("load"))
    add = parser.add_argument_group("comparison").add_argument
    add(
        "--config",
        action="append",
        metavar="'NAME: OPTIONS'",
        help="a configuration to compare, such as 'small: --max-num-seqs 8'; can be repeated",
    )
    add("--ttft", type=positive_float, metavar="MS", help="target of goodput: the first token comes within this time")
    add("--tpot", type=positive_float, metavar="MS", help="target of goodput: the time per output token")
    add("--json", action="store_true", help="print JSON")
    add("--served", action="store_true", help="print JSON with what plots are drawn from; the options are somebody "
        "else's, so they may name no file to write, and no module")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="draw the comparison: .svg or .png")
    parser.add_flags(_GROUPS, _is_simulated)
    return parser


def _add_machine(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder with a config.json, or ORG/NAME of the local cache")
    add("--measured", type=Path, metavar="FILE", help="in place of a MODEL: what a server wrote with --record or "
        "--step-trace; step costs are fitted to it")  # fmt: skip
    add("--gpu", default="h100", help="as in `penstock plan` (default: %(default)s)")
    add("--machines", type=Path, metavar="FILE", help="more devices, in the form of lab/planning/machines.toml")
    add("--weights", choices=BYTES, default="fp16", help="format of weights (default: %(default)s)")
    add("--kv", choices=BYTES, default="fp16", help="format of keys and values (default: %(default)s)")
    add("--tp", type=positive, default=1, help="degree of tensor parallelism (default: %(default)s)")
    add("--pp", type=positive, default=1, help="degree of pipeline parallelism (default: %(default)s)")
    add("--efficiency", type=share, default=1.0, help="part of the rooflines that steps reach (default: %(default)s)")
    add("--copy-gbps", type=positive_float, metavar="GB/S", help="between device and host (default: 10)")
    add("--request-ms", type=not_negative_float, help="from a client's sending until the scheduler has the request")
    add("--reply-ms", type=not_negative_float, help="from the scheduler's sending until the client has the token")


def _add_load(group: "argparse._ArgumentGroup") -> None:
    add = group.add_argument
    add("--load", type=Path, metavar="FILE", help="requests as JSON lines (time, input_len, output_len, ...); without "
        "it, those of the --measured run, or drawn ones if there is a --request-rate")  # fmt: skip
    add("--speed", type=positive_float, default=1.0, help="requests come so many times as fast (default: %(default)s)")
    add("--num-requests", type=positive, default=1000, help="(default: %(default)s)")
    add("--request-rate", type=positive_float, help="a second, on average (default: all at once)")
    add("--burstiness", type=positive_float, default=1.0,
        help="shape of the gaps' gamma distribution: 1 is Poisson, less is bursty (default: %(default)s)")  # fmt: skip
    add("--on-off", type=_pair, metavar="ON:OFF", help="seconds in which requests come, and seconds of silence")
    add("--input-len", type=length_range, default=(1024, 1024), metavar="N|LOW:HIGH", help="tokens of prompts, uniform")
    add("--output-len", type=length_range, default=(128, 128), metavar="N|LOW:HIGH", help="tokens of answers, uniform")
    add("--shared-prefix-len", type=not_negative, default=0, metavar="N", help="first tokens that prompts share")
    add("--num-prefixes", type=positive, default=1, help="prompts share one of so many prefixes")
    add("--num-keys", type=positive, default=1, help="API keys that requests come with, each equally often")
    add("--seed", type=not_negative, default=0, help="of everything that is drawn")
    add("--save-load", type=Path, metavar="FILE", help="write the requests in the form that --load reads")


def _pair(text: str) -> tuple[float, float]:
    on, _, off = text.partition(":")
    return positive_float(on), positive_float(off)


def _table(results: Sequence[Result]) -> Table:
    """A comparison for people: a column for each configuration."""
    made = Table(box=None)
    made.add_column("", no_wrap=True)
    for result in results:
        made.add_column(result.name, justify="right", no_wrap=True)
    for title, path, form in _ROWS:
        made.add_row(title, *(form.format(_figure(result.figures, path)) for result in results))
    return made


def _figure(found: dict[str, Any], path: Sequence[str]) -> Any:
    value: Any = found
    for name in path:
        value = value[name]
    return value


if __name__ == "__main__":
    sys.exit(main())
