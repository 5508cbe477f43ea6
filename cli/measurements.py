"""The checks of `penstock doctor` that need torch, another process, and time: kernels, GPUs, a model's speed."""

from collections.abc import Callable, Iterator

from penstock.cli.checks import Finding, memory_bytes
from penstock.cli.figures import number
from penstock.config import Config, ConfigError
from penstock.config.sizes import size
from penstock.config.slow_kernels import FACTOR
from penstock.lab.planning.costs import Costs
from penstock.lab.planning.machines import Machine
from penstock.lab.planning.plan import Plan
from penstock.lab.planning.requests import Describe, Inspect, Installation, Measurer, MemoryRate, SlowError
from penstock.models.check import check_checkpoint
from penstock.models.description.decoder import Decoder
from penstock.models.families.registry import parse_model_config
from penstock.models.finding.located import find_local
from penstock.models.finding.registry import model_path, open_checkpoint

_CONTEXT = 256
"""Context in tokens for the reported speed."""
_OF_CACHES = 64 << 20
"""Bytes of weights that processor caches may hold."""


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


def measured(model: str | None, patience: float, begin: Callable[[str], None], *, is_quick: bool) -> Iterator[Finding]:
    """Run the checks, those that need torch in another process.

    Args:
        model: as on the command line; None: the demo model.
        patience: seconds to wait for each measurement.
        begin: told what is measured next.
        is_quick: time no made-up models.
    """
    decoder = None
    try:
        decoder = _decoder(model)
    except (ConfigError, OSError) as error:
        yield Finding("broken", "model", str(error), "`penstock models` lists what can be served here")
    again = f"run it again when the machine is quiet, or with --patience {2 * patience:g}"
    rate, name = 0.0, model or "the demo model"
    try:
        with Measurer() as measurer:
            begin("loading torch")
            there = measurer.ask(Inspect(), Installation, patience)
            yield from kernels(there)
            yield from gpus(there)
            if not there.gpus:
                begin("reading memory")
                rate = measurer.ask(MemoryRate(), float, patience)
                threads = f"{there.num_threads} thread{'s' * (there.num_threads > 1)}"
                yield Finding("fine", "memory reads", f"{rate / 1e9:.1f} GB/s with {threads}, measured now")
            if decoder is None:
                return
            if rate and not there.library and not there.compiler:
                # To measure by torch's kernels would take many minutes, and what memory allows they do not reach.
                yield Finding("note", "expected", "not measured: it would take torch's kernels many minutes")
                bounded = expected(name, decoder, _by_memory_alone(rate, there))
                yield from (finding for finding in bounded if finding.title == "room")
                return
            if is_quick and rate:
                yield from expected(name, decoder, _by_memory_alone(rate, there))
                return
            try:
                begin("timing made-up models")
                machine = measurer.ask(Describe(), Machine, patience)
            except SlowError as error:
                yield Finding("note", "measurements", f"of made-up models: {error}", again)
                if not rate:
                    return
                machine = _by_memory_alone(rate, there)
            yield from expected(name, decoder, machine)
    except SlowError as error:
        yield Finding("note", "measurements", str(error), again)
    except ConfigError as error:
        yield Finding("broken", "measurements", str(error), "`python -m penstock.lab.calibration` tells why it ends")


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
    about, why = "about" if plan.is_measured else "at most", ""
    if plan.ledger.weight_bytes < _OF_CACHES and not plan.is_measured and not machine.runtime:
        about, why = "at least", "; more if the caches hold its weights"
    step = plan.decode_step(1, context)
    yield Finding(
        "fine", "expected",
        f"{name}: {about} {number(plan.tokens_per_second(1, context))} tokens/s at 1 row (steps of "
        f"{1e3 * step.seconds:.2f} ms, bound by {step.bound_by}), "
        f"{number(plan.tokens_per_second(8, context))} at 8 rows{why}",
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
