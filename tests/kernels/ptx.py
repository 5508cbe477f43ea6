"""The inline assembly of kernels, for Triton's interpreter: each PTX instruction that they use, on whole arrays."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Words = NDArray[np.uint32]

BITWISE: dict[str, Callable[[Words, Words], Words]] = {
    "and.b32": np.bitwise_and,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
}


class Results(NamedTuple):
    """What a call of assembly returns."""

    handles: list[TensorHandle]

    def get_result(self, i: int) -> TensorHandle:
        return self.handles[i]


def interpret_assembly() -> None:
    """Let Triton's interpreter run inline assembly."""

    def create_inline_asm(
        self: Any, text: str, constraints: str, values: list[TensorHandle], types: list[Any], is_pure: bool, pack: int
    ) -> Results:
        shape, outputs = values[0].data.shape, constraints.count("=")
        inputs = [word for value in values for word in _words(value.data, pack)]
        words = iter(run(text, outputs, inputs))
        handles = []
        for kind in types:
            dtype = np.dtype(interpreter._get_np_dtype(kind))
            its = np.stack([next(words) for _ in range(pack * dtype.itemsize // 4)], 1)
            handles.append(TensorHandle(its.view(dtype).reshape(shape), kind.scalar))
        return Results(handles)

    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm


def _words(data: NDArray[Any], pack: int) -> list[Words]:
    """`pack` neighbours as registers of 32 bits, each for all calls."""
    registers = np.ascontiguousarray(data).reshape(-1, pack).view(np.uint32)
    return [registers[:, i].copy() for i in range(registers.shape[1])]


def run(text: str, outputs: int, inputs: list[Words]) -> list[Words]:
    """Run instructions, one after the other, and return registers $0, $1 and so on.

    Args:
        text: of the assembly.
        outputs: how many registers are written.
        inputs: the registers after them.
    """
    registers: dict[str, Any] = {f"${outputs + i}": words for i, words in enumerate(inputs)}
    size = inputs[0].shape

    def value(name: str) -> Words:
        found: Words = registers[name] if name in registers else np.full(size, int(name, 0), np.uint32)
        return found

    for line in filter(None, (part.strip() for part in text.strip().strip("{}").split(";"))):
        name, rest = line.split(None, 1)
        if name == ".reg":
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if target.startswith("{"):
            assert name == "mov.b32", line
            low, high = re.findall(r"\w+", target)
            registers[low], registers[high] = value(sources[0]) & 0xFFFF, value(sources[0]) >> 16
        else:
            registers[target] = instruction(name, [value(each) for each in sources])
    return [registers[f"${i}"] for i in range(outputs)]


def instruction(name: str, sources: list[Words]) -> Words:
    """What one instruction writes."""
    if name == "mov.b32":
        return sources[0]
    if name in BITWISE:
        return BITWISE[name](*sources)
    if name == "lop3.b32":
        a, b, c, table = sources
        bits = [np.where(table >> i & 1, 0xFFFFFFFF, 0).astype(np.uint32) for i in range(8)]
        terms = [bits[i] & (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8)]
        joined: Words = np.bitwise_or.reduce(terms)
        return joined
    if name == "prmt.b32":
        both = np.stack(sources[:2], 1).view(np.uint8)
        places = sources[2][:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 7
        chosen: Words = np.take_along_axis(both, places.astype(np.int64), 1).view(np.uint32)[:, 0]
        return chosen
    if name == "cvt.rn.f16x2.e4m3x2":
        return _of_halves(np.stack([_from_e4m3(sources[0] & 0xFF), _from_e4m3(sources[0] >> 8)], 1))
    halves = [each[:, None].view(np.float16).astype(np.float64) for each in sources]  # sums and products are exact
    if name == "add.rn.f16x2":
        return _of_halves(halves[0] + halves[1])
    if name == "mul.rn.f16x2":
        return _of_halves(halves[0] * halves[1])
    if name == "fma.rn.f16x2":
        return _of_halves(halves[0] * halves[1] + halves[2])
    raise NotImplementedError(name)


def _of_halves(numbers: NDArray[np.float64]) -> Words:
    with np.errstate(over="ignore"):
        rounded = np.ascontiguousarray(numbers).astype(np.float16)
    words: Words = rounded.view(np.uint32)[:, 0]
    return words


def _from_e4m3(codes: NDArray[Any]) -> NDArray[np.float64]:
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float64)
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7)
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    sizes[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -sizes, sizes)
