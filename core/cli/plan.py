"""`penstock plan`: what a model needs of a device, and how fast it can be there at best. Reads config.json alone."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.core.checkpoint.decoder import Decoder
from penstock.core.checkpoint.families.registry import parse_model_config
from penstock.core.checkpoint.located import find_local
from penstock.core.checkpoint.registry import open_checkpoint
from penstock.core.config import ConfigError
from penstock.core.planning.costs import BYTES, Costs
from penstock.core.planning.machines import Machine, load_machines
from penstock.core.planning.plan import Layout, Load, Plan, batch_for, smallest
from penstock.ipc.process import EXIT_CONFIG

_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
_GB = 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; returns the exit code (2: the options cannot work)."""
    args = _parser().parse_args(argv)
    try:
        machines = load_machines(args.machines)
        if args.gpu not in machines:
            raise ConfigError(f"--gpu {args.gpu} is not known: there are {', '.join(machines)}; --machines adds others")
        costs = Costs(_read(args.model), args.weights, args.kv)
        load = Load(args.input_len, args.output_len, args.qps, _seconds(args.ttft), _seconds(args.tpot))
        plan = _chosen(args, costs, machines[args.gpu], load)
    except (ConfigError, OSError) as error:
        print(f"penstock plan: {error}", file=sys.stderr)
        return EXIT_CONFIG
    found = figures(plan, load, args.batch, args.context or load.context, args.price_per_hour)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, plan)
    return 0


def figures(plan: Plan, load: Load, batch: int | None, context: int, price: float | None) -> dict[str, Any]:
    """Everything that a plan says; times in ms, memory in bytes.

    Args:
        plan: whose figures.
        load: what it is for.
        batch: sequences at once; the fewest that serve the load if None.
        context: tokens of each.
        price: of a device for an hour.
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


def _chosen(args: argparse.Namespace, costs: Costs, machine: Machine, load: Load) -> Plan:
    """The layout that is asked for, else the smallest that serves the load."""
    if args.tp or args.pp or args.dp:
        return Plan(costs, machine, Layout(args.tp or 1, args.pp or 1, args.dp or 1))
    plan = smallest(costs, machine, load)
    if plan is None:
        raise ConfigError(
            f"no more than 64 of {machine.name} serve this load: even at best, a target is missed or memory is short; "
            "loosen --ttft, --tpot or --qps, or say --tp, --pp and --dp to see what happens there"
        )
    return plan


def _read(model: str) -> Decoder:
    path, _, _ = find_local(model)
    if path is None:
        raise ConfigError(f"{model} is neither a folder nor in the local cache; a folder with a config.json is enough")
    config = parse_model_config(open_checkpoint(path).config)
    if not isinstance(config, Decoder):
        raise ConfigError(f"{config.architecture} runs through transformers' code, whose costs are not known here")
    return config


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _print(found: dict[str, Any], plan: Plan) -> None:
    console = Console(highlight=False)
    layout = plan.layout
    console.print(
        f"{plan.costs.decoder.architecture} in {plan.costs.weights} on {layout.num_devices} x {plan.machine.name}"
        f" (TP {layout.tp}, PP {layout.pp}, DP {layout.dp})\n"
    )
    memory = Table("memory of one copy", "GB", box=None)
    for name in ("memory", "weight", "activation", "runtime", "left_for_kv"):
        memory.add_row(name.replace("_", " "), f"{found[name + '_bytes'] / _GB:.1f}")
    memory.add_row("KV of a token, KB", f"{found['kv_bytes_per_token'] / 1e3:.1f}")
    memory.add_row(f"KV of {found['context']:,} tokens", f"{found['kv_bytes_per_sequence'] / _GB:.3f}")
    console.print(memory)
    short = "" if found["fits"] else ", which does not fit"
    console.print(
        f"\nLargest batch of {found['context']:,} tokens: {found['max_batch']:,}; "
        f"longest context of {found['batch']:,} sequences: {found['max_context']:,}\n"
        f"Prefill: at least {found['prefill_ms']:.1f} ms (bound by {found['prefill_bound_by']})\n"
        f"Decode step of {found['batch']:,} sequences{short}: at least {found['decode_step_ms']:.2f} ms "
        f"(bound by {found['bound_by']}); at most {found['tokens_per_second']:,.0f} tokens/s"
    )
    if "cost_per_million_tokens" in found:
        console.print(f"At least {found['cost_per_million_tokens']:.2f} per million tokens of output")
    steps = Table("batch", "step, ms", "bound by", "", box=None)
    for row in found["by_batch"]:
        fits = "" if row["fits"] else "does not fit"
        steps.add_row(str(row["batch"]), f"{row['decode_step_ms']:.2f}", row["bound_by"], fits)
    console.print()
    console.print(steps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock plan",
        description="What a model needs of a device, and the bounds of its speed there: steps take at least as long as "
        "reading memory, computing and sending need. Prints the smallest layout that serves the load.",
    )
    add = parser.add_argument
    add("model", help="a folder with a config.json, or ORG/NAME[@REVISION] of the local Hugging Face cache")
    add(
        "--gpu",
        default="h100",
        help="a100, h100, h200, l40s, rtx-4090, or one of --machines (default: %(default)s)",
    )
    add("--machines", type=Path, metavar="FILE", help="more devices, in the form of core/planning/machines.toml")
    add("--weights", choices=BYTES, default="fp16", help="their format; bf16 is fp16 here (default: %(default)s)")
    add("--kv", choices=BYTES, default="fp16", help="of keys and values (default: %(default)s)")
    add("--input-len", type=_positive, default=1024, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=_positive, default=256, help="tokens of an answer (default: %(default)s)")
    add("--qps", type=float, help="requests per second to serve")
    add("--ttft", type=float, metavar="MS", help="target: a prompt alone is computed within this time")
    add("--tpot", type=float, metavar="MS", help="target: a decode step takes no longer")
    add("--batch", type=_positive, help="sequences at once, in place of the fewest that serve the load")
    add("--context", type=_positive, help="tokens of each, in place of a prompt and its answer")
    for name, what in (("--tp", "tensor"), ("--pp", "pipeline"), ("--dp", "data")):
        add(name, type=_positive, help=f"degree of {what} parallelism, in place of the smallest layout")
    add("--price-per-hour", type=float, help="of one device, for the cost of a million tokens")
    add("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(main())
