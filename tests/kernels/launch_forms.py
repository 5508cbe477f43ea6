"""Launches on their way from one process to another: recorded under the interpreter, compiled where there is none.

The interpreter runs Python, and takes what a compiler refuses. So every launch that the interpreter's tests make is
written down, and compiled ahead of time as a GPU's machine would. A child process records if `FILE` names a file.
"""

import ast
import atexit
import importlib
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

from tests.faults.soak import IS_SOAK
from tests.kernels.launch_recorder import Launch, Pointer, describe

FILE = "PENSTOCK_LAUNCH_FORMS"
"""Names the environment variable."""

Form = tuple[str, tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]
"""(module:kernel, arguments, options); a tensor is ("pointer", dtype, is aligned)."""

_forms: set[Form] = set()


def form_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    """What a launch hands over, in numbers and words."""
    names = function.arg_names
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    arguments = tuple((name, _portable(given[name])) for name in names if name in given)
    options = tuple(sorted((name, value) for name, value in kwargs.items() if name not in names))
    return f"{function.fn.__module__}:{function.fn.__name__}", arguments, options


def _portable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_aligned = value.storage_offset() * value.element_size() % 16 == 0
        return ("pointer", str(value.dtype).removeprefix("torch."), is_aligned)
    return value


def note(function: InterpretedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write a launch down, if this process is to."""
    if FILE in os.environ:
        _forms.add(form_of(function, args, kwargs))


def start_to_note() -> None:
    """From now on every launch is noted; at the end of the process they are in the file."""
    if FILE not in os.environ:
        return
    run = InterpretedFunction.run

    def run_and_note(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        note(self, args, kwargs)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run_and_note
    atexit.register(lambda: Path(os.environ[FILE]).write_text("\n".join(map(repr, sorted(_forms, key=repr)))))


def noted(file: Path) -> list[Form]:
    """What a process has written."""
    return [ast.literal_eval(line) for line in file.read_text().splitlines()]


def launch_of(form: Form) -> Launch:
    """The launch as Triton's dispatcher would see it."""
    place, arguments, options = form
    module, name = place.split(":")
    kernel = getattr(importlib.import_module(module), name)
    values = {
        argument: Pointer(getattr(torch, value[1]), value[2]) if isinstance(value, tuple) else value
        for argument, value in arguments
    }
    return describe(kernel, (), {**values, **dict(options)})


def different(forms: Iterable[Form]) -> list[Form]:
    """One form of each that would be compiled separately; but in soak, only those that show a compiler something new.

    That is a type, an alignment, an integer that is 1, a switch or a constant in a place where no other has it. Large
    constants, which are sizes of tiles, are all alike.
    """
    seen: set[Any] = set()
    chosen = []
    for form in forms:
        launch = launch_of(form)
        traits: set[Any] = {launch.key}
        if not IS_SOAK:
            kernel = launch.kernel.__name__
            traits = {(kernel, name, kind) for name, kind in launch.signature.items()}
            traits |= {(kernel, "aligned", at) for at in launch.attrs}
            traits |= {(kernel, at, _trait(value)) for at, value in launch.constants.items()}
        if not traits <= seen:
            seen |= traits
            chosen.append(form)
    return chosen


def _trait(value: Any) -> Any:
    is_large = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 1
    return "large" if is_large else repr(value)


def errors_of(forms: Iterable[Form]) -> list[str]:
    """Compile forms for sm_90, in soak for sm_80 as well; what went wrong."""
    jobs = [(form, capability) for form in different(forms) for capability in ((80, 90) if IS_SOAK else (90,))]
    assert jobs
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(filter(None, pool.map(_error_of, jobs, chunksize=2)))


def _error_of(job: tuple[Form, int]) -> str:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the present default; unset, newer releases warn
    form, capability = job
    launch = launch_of(form)
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attrs)
    try:
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    except Exception as error:
        return f"sm_{capability} {form}: {type(error).__name__}: {error}"
    return ""
