"""`penstock doctor`: examines this machine, how fast it serves a model, and what is misconfigured."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from rich.console import Console
from rich.markup import escape

from penstock.cli.checks import Finding, all_checks
from penstock.config.argument_types import positive_float
from penstock.config.parser import Parser

_COLOURS = {"fine": "green", "note": "cyan", "slow": "yellow", "broken": "red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, print; return the exit code (1: something is broken)."""
    parser = Parser(
        "penstock doctor",
        "Look at this machine: versions, processor and kernels, memory, limits, GPUs. Measure how fast it "
        "reads memory, say how many tokens per second to expect of a model, and what is misconfigured.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder, or ORG/NAME of the local cache (default: the demo model)"
    )
    parser.add_argument("--quick", action="store_true", help="a bound by memory alone: no made-up models are timed")
    parser.add_argument(
        "--patience", type=positive_float, default=60.0, metavar="SECONDS",
        help="longest wait for a measurement, which a busy machine takes long for (default: 60)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, at the end")
    args = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    findings = []
    with console.status("") if console.is_terminal and not args.json else nullcontext() as status:
        for finding in _findings(args, lambda what: status.update(f"{what} ...") if status is not None else None):
            findings.append(finding)
            if not args.json:
                _print(console, finding)
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        _print_advice(console, findings)
    return int(any(finding.level == "broken" for finding in findings))


def _findings(args: Namespace, begin: Callable[[str], None]) -> Iterator[Finding]:
    """What is found, as it is found."""
    is_broken = False
    for finding in all_checks():
        is_broken |= finding.level == "broken"
        yield finding
    if is_broken:
        yield Finding("note", "measurements", "left out, as something above is broken")
        return
    begin("looking at the model")
    from penstock.cli.measurements import measured  # imported now, because its imports take time

    yield from measured(args.model, args.patience, begin, is_quick=args.quick)


def _print(console: Console, finding: Finding) -> None:
    level, title, text, _ = finding
    console.print(f"[{_COLOURS[level]}]{level:<7}[/] {title:<16} {escape(text)}")
    console.file.flush()  # also where it is read by a program


def _print_advice(console: Console, findings: Sequence[Finding]) -> None:
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
