"""`penstock doctor`: examines this machine, how fast it serves a model, and what is misconfigured."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from penstock.core.checkpoint.check import check_checkpoint
from penstock.core.checkpoint.description.decoder import Decoder
from penstock.core.checkpoint.families.registry import parse_model_config
from penstock.core.checkpoint.finding.located import find_local
from penstock.core.checkpoint.finding.registry import model_path, open_checkpoint
from penstock.core.cli.checks import Finding, all_checks, memory_bytes
from penstock.core.cli.figures import number, size
from penstock.core.config import Config, ConfigError
from penstock.core.config.slow_kernels import FACTOR
from penstock.core.planning.costs import Costs
from penstock.core.planning.machines import Machine
from penstock.core.planning.plan import Plan
from penstock.core.planning.requests import Describe, Inspect, Installation, Measurer, MemoryRate

_CONTEXT = 256
"""Context in tokens for the reported speed."""
_OF_CACHES = 64 << 20
"""Bytes of weights that processor caches may hold."""
_COLOURS = {"fine": "green", "note": "cyan", "slow": "yellow", "broken": "red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, print; return the exit code (1: something is broken)."""
    parser = argparse.ArgumentParser(
        prog="penstock doctor",
        description="Look at this machine: versions, processor and kernels, memory, limits, GPUs. Measure how fast it "
        "reads memory, say how many tokens per second to expect of a model, and what is misconfigured.",
    )
    parser.add_argument("model", nargs="?", help="a folder, or ORG/NAME of the local cache (default: the demo model)")
    parser.add_argument("--quick", action="store_true", help="a bound by memory alone: no made-up models are timed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    findings = list(all_checks())
    decoder = None
    try:
        decoder = _decoder(args.model)
    except (ConfigError, OSError) as error:
        findings.append(Finding("broken", "model", str(error), "`penstock models` lists what can be served here"))
    if all(finding.level != "broken" or finding.title == "model" for finding in findings):
        findings += _measured(args.model or "the demo model", decoder, is_quick=args.quick)
    else:
        findings.append(Finding("note", "measurements", "left out, as something above is broken"))
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        _print(findings)
    return int(any(finding.level == "broken" for finding in findings))


def _decoder(model: str | None) -> Decoder | None:
    """Return the model's description; None if transformers' code computes the model.

    Raises:
        ConfigError: there is none, or it cannot be served.
    """
    path = model_path(Config()) if model is None else find_local(model)[0]
    if path is None:
        raise ConfigError(f"{model} is neither a folder nor in the local cache")
    checkpoint = open_checkpoint(path)
    check_checkpoint(checkpoint)
    config = parse_model_config(checkpoint.config)
    return config if isinstance(config, Decoder) else None


def _measured(name: str, decoder: Decoder | None, *, is_quick: bool) -> Iterator[Finding]:
    """Run the checks that need torch, in another process."""
    try:
        with Measurer() as measurer:
            there = measurer.ask(Inspect(), Installation)
            yield from kernels(there)
            yield from gpus(there)
            rate = 0.0
            if not there.gpus:
                rate = measurer.ask(MemoryRate(), float)
                threads = f"{there.num_threads} thread{'s' * (there.num_threads > 1)}"
                yield Finding("fine", "memory reads", f"{rate / 1e9:.1f} GB/s with {threads}, measured now")
            if decoder is None:
                return
            if rate and not there.library and not there.compiler:
                # To measure by torch's kernels would take many minutes, and what memory allows they do not reach.
                yield Finding("note", "expected", "not measured: it would take torch's kernels many minutes")
                bounded = expected(name, decoder, _by_memory_alone(rate, there))
                yield from (finding for finding in bounded if finding.title == "room")
            elif is_quick and rate:
                yield from expected(name, decoder, _by_memory_alone(rate, there))
            else:
                yield from expected(name, decoder, measurer.ask(Describe(), Machine))
    except ConfigError as error:
        yield Finding("broken", "measurements", str(error), "`python -m penstock.calibration` tells why it ends")


def _by_memory_alone(rate: float, there: Installation) -> Machine:
    """Return a CPU that computes as fast as it reads memory, an upper bound."""
    found = memory_bytes()
    return Machine(
        name="this processor",
        memory=float(found[0] if found is not None else 1 << 62),
        bandwidth=rate,
        link=rate,
        flops={"fp16": 1e15},
        runtime=0.0,
        most=1,
        weights="fp16" if there.library else "fp32",
    )


def kernels(there: Installation) -> Iterator[Finding]:
    """Which kernels a worker on this CPU gets."""
    compiler = there.compiler or "no compiler"
    if there.library:
        fits = f"for {there.family}" if there.family else "for this processor"
        amx = "; long prompts with much attention go to torch's" if there.multiplies_tiles else ""
        yield Finding("fine", "CPU kernels", f"native, compiled {fits}: {there.library}{amx}")
        yield Finding("fine", "compiler", compiler)
    elif there.compiler:
        yield Finding(
            "slow", "CPU kernels", f"torch's, up to {FACTOR} times slower: the native ones are not compiled yet",
            f"the next start compiles them with {compiler}; so does python -m penstock.kernels.native.build",
        )  # fmt: skip
    else:
        yield Finding(
            "slow", "CPU kernels",
            f"torch's, up to {FACTOR} times slower: the native ones are not compiled, and there is no compiler",
            "apt install g++, then python -m penstock.kernels.native.build; or a wheel of Penstock, which has them",
        )  # fmt: skip


def gpus(there: Installation) -> Iterator[Finding]:
    """The GPUs that torch finds, and those that it should have found."""
    for name, num_bytes in there.gpus:
        yield Finding(
            "fine", "GPU", f"{name}, {size(num_bytes)}, driver {there.driver or '?'}, CUDA {there.cuda or '?'}"
        )
    if there.gpus:
        return
    if not there.driver:
        yield Finding("fine", "GPU", "none")
    elif not there.cuda:
        yield Finding(
            "slow", "GPU", f"driver {there.driver}, but torch {there.torch} is built without CUDA",
            "pip install torch from the index for CUDA: https://pytorch.org/get-started",
        )  # fmt: skip
    else:
        yield Finding(
            "slow", "GPU", f"driver {there.driver}, but torch finds no device: {there.cuda_error or 'no reason told'}",
            "CUDA_VISIBLE_DEVICES, --gpus all of Docker, or a driver that is new enough for CUDA " + there.cuda,
        )  # fmt: skip


def expected(name: str, decoder: Decoder, machine: Machine) -> Iterator[Finding]:
    """The expected speed of a model on a measured or known machine."""
    plan = Plan(Costs(decoder, machine.weights, machine.kv), machine)
    context = min(_CONTEXT, decoder.max_model_len)
    about = "about" if plan.is_measured else "at most"
    if plan.ledger.weight_bytes < _OF_CACHES and not plan.is_measured and not machine.runtime:
        about = "(more, as its weights fit caches: leave out --quick)"
    step = plan.decode_step(1, context)
    yield Finding(
        "fine", "expected",
        f"{name}: {about} {number(plan.tokens_per_second(1, context))} tokens/s at 1 row (steps of "
        f"{1e3 * step.seconds:.2f} ms, bound by {step.bound_by}), "
        f"{number(plan.tokens_per_second(8, context))} at 8 rows",
    )  # fmt: skip
    weights, free = plan.ledger.weight_bytes, memory_bytes()
    if plan.ledger.left <= 0:
        yield Finding(
            "broken",
            "room",
            f"{name} needs {size(weights)} for its weights alone",
            "a smaller model, or --quantization int8",
        )
    elif machine.steps is not None and free is not None and weights > free[1]:
        yield Finding(
            "slow",
            "room",
            f"{name} needs {size(weights)}, and {size(free[1])} are available now",
            "end other processes",
        )
    else:
        yield Finding(
            "fine",
            "room",
            f"{size(weights)} of weights; {number(plan.max_batch(context))} sequences of {context} tokens fit",
        )


def _print(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for level, title, text, _ in findings:
        console.print(f"[{_COLOURS[level]}]{level:<7}[/] {title:<16} {escape(text)}")
    wrong = [finding for finding in findings if finding.advice]
    console.print()
    if not wrong:
        console.print("Nothing is misconfigured.")
        return
    console.print("What to do:")
    for at, finding in enumerate(wrong, 1):
        console.print(f"{at}. {finding.title}: {escape(finding.advice)}")


if __name__ == "__main__":
    sys.exit(main())
