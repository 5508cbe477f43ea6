"""Which forms of the kernels launches ask for: what Triton's dispatcher would compile separately."""

import inspect
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels.launch_forms import note


def kind_of(function: InterpretedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Kernel, constants, options, and each argument's type with its value-1 and divisible-by-16 specialisation."""
    parameters = inspect.signature(function.fn).parameters
    options = {name: value for name, value in kwargs.items() if name not in parameters}
    exempt = set(function.kwargs.get("do_not_specialize") or ())
    unaligned = exempt | set(function.kwargs.get("do_not_specialize_on_alignment") or ())
    said = [function.fn.__name__, str(options)]
    for name, value in {**dict(zip(parameters, args, strict=False)), **kwargs}.items():
        if name not in parameters:
            continue
        if "constexpr" in str(parameters[name].annotation) or value is None or isinstance(value, (bool, float)):
            said.append(f"{name}={value}" if not isinstance(value, float) else name)
        elif isinstance(value, torch.Tensor):
            is_aligned = value.storage_offset() * value.element_size() % 16 == 0
            said.append(f"{name}:{value.dtype}{'D' if is_aligned and name not in unaligned else ''}")
        elif name not in exempt:
            said.append(f"{name}:{'1' if value == 1 else 'D' if value % 16 == 0 else 'i'}{value.bit_length() > 31}")
    return " ".join(said)


def recorded_kinds(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Launches write nothing from here on; how often each kind was asked for."""
    kinds: dict[str, int] = {}

    def run(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(self, args, kwargs)
        kind = kind_of(self, args, kwargs)
        kinds[kind] = kinds.get(kind, 0) + 1

    monkeypatch.setattr(InterpretedFunction, "run", run)
    # What a kernel leaves in new memory is not initialised then: token ids among it would be out of range.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())
    return kinds
