"""Turns launches into compile jobs: the launchers run on meta tensors, so what is compiled is what would run.

A recorded launch holds what Triton's own dispatcher would derive from its arguments: pointer and integer
types, the value-1 and divisible-by-16 specialisations, the constants and the options.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.int8: "i8",
}


class Pointer(NamedTuple):
    """A tensor that is not there."""

    dtype: torch.dtype
    is_aligned: bool


@dataclass(frozen=True)
class Launch:
    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, int]

    @property
    def key(self) -> str:
        constants = {self.kernel.arg_names[at[0]]: value for at, value in self.constants.items()}
        return f"{self.kernel.__name__} {self.options} {constants} {self.signature} {self.attrs}"


@dataclass(frozen=True)
class Resources:
    registers: int
    stack_bytes: int
    shared_bytes: int


def describe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    bound = dict(zip(kernel.arg_names, args, strict=False))
    bound.update({name: value for name, value in kwargs.items() if name in kernel.arg_names})
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attrs: dict[tuple[int, ...], Any] = {}
    for i, param in enumerate(kernel.params):
        value = bound[param.name]
        is_one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or is_one or value is None:
            signature[param.name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            value = Pointer(value.dtype, value.storage_offset() * value.element_size() % 16 == 0)
        if isinstance(value, Pointer):
            signature[param.name] = "*" + TYPES[value.dtype]
            aligned = value.is_aligned
        elif isinstance(value, float):
            signature[param.name] = "fp32"
            aligned = False
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned and not (param.do_not_specialize or param.do_not_specialize_on_alignment):
            attrs[(i,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    return Launch(kernel, signature, constants, attrs, options)


@contextmanager
def recording(monkeypatch_run: Callable[[Any, str, Any], None]) -> Iterator[list[Launch]]:
    """Collect launches instead of running them; `monkeypatch_run` is pytest's `monkeypatch.setattr`."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(describe(self, args, kwargs))

    monkeypatch_run(triton.runtime.JITFunction, "run", run)
    yield launches


def compile_launch(launch: Launch, capability: int) -> Resources:
    """Compile for a compute capability (80, 90) and read what the machine code uses."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attrs)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = _resource_usage(tool, compiled.asm["cubin"])
    used = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert used, report
    return Resources(int(used[1]), int(used[2]), int(compiled.metadata.shared))


def _resource_usage(tool: Path, cubin: bytes) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
