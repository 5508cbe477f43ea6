"""`penstock plan`: what a model needs of a device, and how fast it can be there. Reads config.json alone."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.config import ConfigError
from penstock.config.argument_types import positive, positive_float
from penstock.config.parser import Parser
from penstock.ipc.process import EXIT_CONFIG
from penstock.lab.planning.costs import BYTES, Costs
from penstock.lab.planning.machines import Machine, load_machines
from penstock.lab.planning.plan import Layout, Load, Plan, batch_for, smallest
from penstock.lab.planning.plot import draw
from penstock.lab.planning.requests import Describe, Measurer
from penstock.lab.planning.verify import Compared, verify
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.located import find_local
from penstock.models.finding.registry import open_checkpoint
from penstock.models.quantization import with_quantization

THIS = "this"
_USUAL = "h100"
_COMPUTED_IN = {"int8": "int8", "fp8": "fp8"}
"""Formats whose inputs are rounded, too: products are computed in them."""
_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
_GB = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; return the exit code (2: the options cannot work)."""
    args = _parser().parse_args(argv)
    compared = None
    try:
        folder = _folder(args.model)
        machine = _machine(args)
        decoder = _read(folder, args.quantization)
        computed_in = _COMPUTED_IN.get(args.quantization, machine.weights)
        costs = Costs(decoder, args.weights or computed_in, args.kv or machine.kv)
        if args.verify and decoder.quantization is not None:
            raise ConfigError("--verify runs models of floats: leave out --quantization, or name the float checkpoint")
        load = Load(args.input_len, args.output_len, args.qps, _seconds(args.ttft), _seconds(args.tpot))
        context = args.context or load.context
        if (longest := max(context, load.context)) > decoder.max_model_len:
            raise ConfigError(
                f"sequences of {longest:,} tokens: the model's may have {decoder.max_model_len:,} at most"
            )
        plan = _chosen(args, costs, machine, load)
        found = figures(plan, load, args.batch, context, args.price_per_hour)
        if args.plot is not None:
            draw(plan, found["context"], args.plot)
        if args.verify:
            if plan.layout.num_devices > 1:
                raise ConfigError("--verify runs one copy on one device: leave out --tp, --pp and --dp, or say 1")
            compared = verify(plan, folder)
    except (ConfigError, OSError) as error:
        print(f"penstock plan: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if args.json:
        rows = [{**msgspec.structs.asdict(row), "error": row.error} for row in compared or ()]
        print(json.dumps(found | ({} if compared is None else {"verified": rows}), indent=2))
        return 0
    _print(found, plan)
    if compared is not None:
        _print_compared(compared)
    return 0


def figures(plan: Plan, load: Load, batch: int | None, context: int, price: float | None) -> dict[str, Any]:
    """Return all figures of a plan; times in ms, memory in bytes.

    Args:
        plan: whose figures.
        load: the load that it serves.
        batch: sequences at once; None: the fewest that serve the load.
        context: tokens of each sequence.
        price: of one device per hour.
    """
    costs, ledger, layout = plan.costs, plan.ledger, plan.layout
    batch = batch or batch_for(plan, load) or max(1, plan.max_batch(context))
    decode, prefill = plan.decode_step(batch, context), plan.prefill(load.input_len)
    rate = plan.tokens_per_second(batch, context)
    max_batch = plan.max_batch(context)
    found: dict[str, Any] = {
        "machine": plan.machine.name,
        "num_devices": layout.num_devices,
        "layout": layout._asdict(),
        "parameters": costs.num_parameters,
        "active_parameters": costs.num_active,
        "memory_bytes": ledger.memory,
        "weight_bytes": ledger.weight_bytes,
        "activation_bytes": ledger.activation_bytes,
        "runtime_bytes": ledger.runtime_bytes,
        "left_for_kv_bytes": ledger.left,
        "kv_bytes_per_token": costs.kv_bytes_per_token,
        "kv_bytes_per_sequence": costs.kv_bytes(context),
        "state_bytes_per_sequence": costs.state_bytes,
        "context": context,
        "batch": batch,
        "fits": batch <= max_batch,
        "max_batch": max_batch,
        "max_context": plan.max_context(batch),
        "decode_step_ms": 1e3 * decode.seconds,
        "bound_by": decode.bound_by,
        "prefill_ms": 1e3 * prefill.seconds,
        "prefill_bound_by": prefill.bound_by,
        "tokens_per_second": rate,
        "ridge_flops_per_byte": plan.machine.rate(costs.weights) / plan.machine.bandwidth,
        "by_batch": [
            {"batch": some, "decode_step_ms": 1e3 * step.seconds, "bound_by": step.bound_by, "fits": some <= max_batch}
            for some, step in ((some, plan.decode_step(some, context)) for some in _BATCHES)
        ],
    }
    if price is not None:
        found["cost_per_million_tokens"] = price * layout.num_devices / rate / 3600 * 1e6
    return found


def _machine(args: argparse.Namespace) -> Machine:
    """Return the requested device; this machine's may have to be measured."""
    machines = load_machines(args.machines)
    if args.measure and args.gpu != THIS and not args.verify:
        raise ConfigError(f"--measure measures this machine: say --gpu {THIS}")
    if args.gpu == THIS or args.verify:
        if args.gpu not in (THIS, None):
            raise ConfigError(f"--verify compares with what this machine does: say --gpu {THIS}, or leave --gpu out")
        with Measurer() as measurer:
            return measurer.ask(Describe(args.machines and str(args.machines.absolute()), args.measure), Machine)
    name = args.gpu or _USUAL
    if name not in machines:
        known = ", ".join((*machines, THIS))
        raise ConfigError(f"--gpu {name} is not known: there are {known}; --machines adds others")
    return machines[name]


def _chosen(args: argparse.Namespace, costs: Costs, machine: Machine, load: Load) -> Plan:
    """Return the plan with the requested layout, else the smallest that serves the load."""
    wanted = args.tp, args.pp, args.dp, args.enable_expert_parallel, args.num_redundant_experts
    if any(wanted):
        tp, pp, dp, ep, num_redundant = wanted
        return Plan(costs, machine, Layout(tp or 1, pp or 1, dp or 1, ep, num_redundant))
    plan = smallest(costs, machine, load)
    if plan is None:
        raise ConfigError(
            f"no more than {machine.most} of {machine.name} serve this load: even at best, a target is missed or "
            "memory is short; loosen --ttft, --tpot or --qps, or say --tp, --pp and --dp to see what happens there"
        )
    return plan


def read_decoder(model: str) -> Decoder:
    """Return the description of a model in a folder or in the local cache.

    Raises:
        ConfigError: there is none.
    """
    return _read(_folder(model))


def _folder(model: str) -> Path:
    path, _, _ = find_local(model)
    if path is None:
        raise ConfigError(f"{model} is neither a folder nor in the local cache; a folder with a config.json is enough")
    return path


def _read(folder: Path, quantization: str = "") -> Decoder:
    config = with_quantization(parse_model_config(open_checkpoint(folder).config), quantization)
    if not isinstance(config, Decoder):
        raise ConfigError(
            f"{config.architecture} {config.why_whole}: what a step reads is known of decoders of our own families, "
            "and for others config.json is not enough for a plan"
        )
    return config


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _format(costs: Costs) -> str:
    quantization = costs.decoder.quantization
    return costs.weights if quantization is None else f"{quantization.name}, computed in {costs.weights},"


def _print(found: dict[str, Any], plan: Plan) -> None:
    console = Console(highlight=False)
    layout = plan.layout
    console.print(
        f"{plan.costs.decoder.architecture} in {_format(plan.costs)} on {layout.num_devices} x {plan.machine.name}"
        f" (TP {layout.tp}, PP {layout.pp}, DP {layout.dp})\n"
    )
    memory = Table("memory of one copy", "GB", box=None)
    for name in ("memory", "weight", "activation", "runtime", "left_for_kv"):
        memory.add_row(name.replace("_", " "), f"{found[name + '_bytes'] / _GB:.1f}")
    memory.add_row("KV of a token, KB", f"{found['kv_bytes_per_token'] / 1e3:.1f}")
    memory.add_row(f"KV of {found['context']:,} tokens", f"{found['kv_bytes_per_sequence'] / _GB:.3f}")
    if found["state_bytes_per_sequence"]:
        state = found["state_bytes_per_sequence"] / _GB
        memory.add_row("State of a sequence, or a snapshot", f"{state:.3f}")
    console.print(memory)
    least, most = ("about", "about") if plan.is_measured else ("at least", "at most")
    short = "" if found["fits"] else ", which does not fit"
    console.print(
        f"\nLargest batch of {found['context']:,} tokens: {found['max_batch']:,}; "
        f"longest context of {found['batch']:,} sequences: {found['max_context']:,}\n"
        f"Prefill: {least} {found['prefill_ms']:.1f} ms (bound by {found['prefill_bound_by']})\n"
        f"Decode step of {found['batch']:,} sequences{short}: {least} {found['decode_step_ms']:.2f} ms "
        f"(bound by {found['bound_by']}); {most} {found['tokens_per_second']:,.0f} tokens/s"
    )
    if "cost_per_million_tokens" in found:
        console.print(f"At least {found['cost_per_million_tokens']:.2f} per million tokens of output")
    steps = Table("batch", "step, ms", "bound by", "", box=None)
    for row in found["by_batch"]:
        fits = "" if row["fits"] else "does not fit"
        steps.add_row(str(row["batch"]), f"{row['decode_step_ms']:.2f}", row["bound_by"], fits)
    console.print()
    console.print(steps)


def _print_compared(rows: Sequence[Compared]) -> None:
    table = Table("measured here", box=None)
    for column in ("predicted", "measured", "error"):
        table.add_column(column, justify="right")
    for row in rows:
        scale, unit = (1e3, "ms") if row.unit == "seconds" else (1e-6, "MB")
        table.add_row(
            row.what,
            f"{row.predicted * scale:,.2f} {unit}",
            f"{row.measured * scale:,.2f} {unit}",
            f"{row.error:+.1%}",
        )
    console = Console(highlight=False)
    console.print()
    console.print(table)


def _parser() -> Parser:
    parser = Parser(
        "penstock plan",
        "What a model needs of a device, and the bounds of its speed there: steps take at least as long as "
        "reading memory, computing and sending need. Prints the smallest layout that serves the load.",
    )
    add = parser.add_argument
    add("model", help="a folder with a config.json, or ORG/NAME[@REVISION] of the local Hugging Face cache")
    add(
        "--gpu",
        help=f"a100, h100, h200, l40s, rtx-4090, one of --machines, or `{THIS}` for this machine, whose processor is "
        f"measured if that was not done within a day (default: {_USUAL}, or {THIS} with --verify)",
    )
    add("--machines", type=Path, metavar="FILE", help="more devices, in the form of lab/planning/machines.toml")
    add("--weights", choices=BYTES, help="their format; bf16 is fp16 here (default: what the machine computes with)")
    add(
        "--quantization",
        default="",
        help="as the option of `penstock serve`: weights quantized at load; a quantized checkpoint needs none",
    )
    add(
        "--kv",
        choices=BYTES,
        help="format of keys and values (default: fp16, or what a description in --machines says)",
    )
    add("--input-len", type=positive, default=1024, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=positive, default=256, help="tokens of an answer (default: %(default)s)")
    add("--qps", type=positive_float, help="requests per second to serve")
    add("--ttft", type=positive_float, metavar="MS", help="target: a prompt alone is computed within this time")
    add("--tpot", type=positive_float, metavar="MS", help="target: a decode step takes no longer")
    add("--batch", type=positive, help="sequences at once, in place of the fewest that serve the load")
    add("--context", type=positive, help="tokens of each, in place of a prompt and its answer")
    for name, what in (("--tp", "tensor"), ("--pp", "pipeline"), ("--dp", "data")):
        add(name, type=positive, help=f"degree of {what} parallelism, in place of the smallest layout")
    add("--enable-expert-parallel", action="store_true", help="with --tp: whole experts on each of these devices")
    add(
        "--num-redundant-experts",
        type=positive,
        default=0,
        metavar="N",
        help="further copies of experts in each layer",
    )
    add("--price-per-hour", type=positive_float, help="of one device, for the cost of a million tokens")
    add("--verify", action="store_true", help="run the model here for a minute, and compare")
    add("--measure", action="store_true", help=f"with --gpu {THIS}: measure now")
    add("--plot", type=Path, metavar="FILE", help="draw roofline and latency (.svg, .png; needs matplotlib)")
    add("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
