"""Compares a plan with the engine on this machine: predictions, measurements, and errors.

The machine is measured first, and its pace before and after each run. If it is shared, its pace may change within
seconds, so that a prediction for one minute says nothing about the next. Out of several rounds of runs, the one with
the median error is shown.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.lab.planning.machines import Machine
from penstock.lab.planning.plan import Plan
from penstock.lab.planning.requests import Loaded, LoadModel, MeasurePace, Measurer, Memory, Ran, Remeasure, Run
from penstock.lab.planning.step_costs import Pace

_RUNS = ((1, 128), (1, 1024), (4, 256), (8, 64), (16, 128), (4, 1024), (32, 64), (1, 2048), (16, 512))
"""(number of prompts, length of each), the most informative first."""
_STEP_TOKENS = 1024
_PAGE = 32  # tokens; more than a page has
_ROUND_SECONDS = 9.0  # seconds of runs in a round
_MOST_DECODES, _DECODE_SECONDS = 100, 0.4
_MOST_ROUNDS = 7
_LOGIT_BYTES = 4


class Compared(msgspec.Struct, frozen=True):
    """One compared figure, in seconds or bytes."""

    what: str
    unit: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The prediction's error, as a share of the measurement."""
        return self.predicted / self.measured - 1


class _Case(NamedTuple):
    batch: int
    context: int
    num_decodes: int


def verify(plan: Plan, folder: Path, seconds: float = 60.0) -> list[Compared]:
    """Load and run the model here, in about `seconds`.

    Args:
        plan: for one device, which is this machine's.
        folder: the model's; without weights, random ones are made.
        seconds: after the first round, a round that would exceed this time is not begun.

    Raises:
        ConfigError: the model cannot be run here.
    """
    began = time.monotonic()
    decoder = plan.costs.decoder
    cases = _cases(plan)
    longest = max(case.context + case.num_decodes for case in cases) + 1
    tokens = max(case.batch * (case.context + case.num_decodes + _PAGE) for case in cases)
    pool = max(tokens, longest + _PAGE) * plan.costs.kv_bytes_per_token
    options = {
        "device": "auto" if plan.machine.steps is None else "cpu",
        "max_num_seqs": max(case.batch for case in cases),
        "max_num_batched_tokens": _STEP_TOKENS,
        "max_model_len": longest,
        "cpu_kv_cache_gib": pool / 2**30,
    }
    found: dict[str, list[Compared]] = {}
    with Measurer() as of_machine, Measurer() as of_model:
        of_model.ask(LoadModel(str(folder), options), Loaded)
        of_model.ask(Run(*cases[0]), Ran)  # warm up
        machine, lasted = plan.machine, 0.0
        if machine.steps is not None:
            machine = of_machine.ask(Remeasure(), Machine)
        for number in range(_MOST_ROUNDS):
            started = time.monotonic()
            if number and started - began + lasted > seconds:
                break
            before = _pace(of_machine, machine)
            for case in cases:
                ran = of_model.ask(Run(case.batch, case.context, case.num_decodes), Ran)
                after = _pace(of_machine, machine)
                meanwhile, before = _at_pace(machine, before, after), after
                for compared in _compared(plan._replace(machine=meanwhile), case, ran):
                    found.setdefault(compared.what, []).append(compared)
            lasted = time.monotonic() - started
        resident = of_model.ask(Memory(), int)
    rows = [sorted(each, key=lambda one: one.error)[len(each) // 2] for each in found.values()]
    if machine.steps is None:
        return rows  # on a GPU the process's memory is not the model's
    ledger = plan._replace(machine=machine).ledger_of(_STEP_TOKENS)
    logits = max(case.batch for case in cases) * decoder.vocab_size * _LOGIT_BYTES
    needed = ledger.weight_bytes + ledger.activation_bytes + ledger.runtime_bytes + logits + pool
    return [*rows, Compared("memory", "bytes", needed, float(resident))]


def _pace(of_machine: Measurer, machine: Machine) -> Pace:
    return Pace() if machine.steps is None else of_machine.ask(MeasurePace(), Pace)


def _at_pace(machine: Machine, before: Pace, after: Pace) -> Machine:
    if machine.steps is None:
        return machine
    mean = Pace((before.computing + after.computing) / 2, (before.streaming + after.streaming) / 2)
    return msgspec.structs.replace(machine, steps=machine.steps.at_pace(mean))


def _cases(plan: Plan) -> list[_Case]:
    """Return as many cases as a round has time for, at least one."""
    found, lasts = list[_Case](), 0.0
    for batch, context in _RUNS:
        decode = plan.decode_step(batch, context).seconds
        num_decodes = max(4, min(_MOST_DECODES, int(_DECODE_SECONDS / decode)))
        takes = batch * plan.prefill(context).seconds + num_decodes * decode
        fits = context + num_decodes < plan.costs.decoder.max_model_len
        if fits and (lasts + takes <= _ROUND_SECONDS or not found):
            found.append(_Case(batch, context, num_decodes))
            lasts += takes
    return found


def _compared(plan: Plan, case: _Case, ran: Ran) -> Sequence[Compared]:
    """Compare the steps with prompts, and a decode step."""
    prompts = [(chunks, seconds) for chunks, seconds in ran.steps if any(count > 1 for _, count in chunks)]
    decodes = [(chunks, seconds) for chunks, seconds in ran.steps if all(count == 1 for _, count in chunks)]
    found = list[Compared]()
    for what, steps in (
        (f"prefill, {case.batch} x {case.context:,} tokens", prompts),
        (f"decode, {case.batch} x {case.context:,} tokens", decodes),
    ):
        if steps:
            predicted = sum(plan.step_of(chunks).seconds for chunks, _ in steps)
            found.append(Compared(what, "seconds", predicted, sum(seconds for _, seconds in steps)))
    return found
