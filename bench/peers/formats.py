"""One format of weights, in the form that each system has of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Format(NamedTuple):
    """What each system is given; empty: it has no such form."""

    penstock: tuple[str, ...] = ()  # flags that make the format at load
    gguf: str = ""  # llama-quantize's name; Penstock serves the same file
    openvino: str = ""  # optimum's --weight-format
    vllm: bool = False  # it takes the checkpoint as it is
    bits: float = 16  # of a weight, scales included; of a GGUF file its own size counts


FORMATS: Mapping[str, Format] = {
    "bf16": Format(gguf="BF16", openvino="fp16", vllm=True),
    "int8": Format(("--quantization", "int8"), openvino="int8", bits=8),
    "int4": Format(("--quantization", "int4"), openvino="int4", bits=4.5),
    "q8_0": Format(gguf="Q8_0"),
    "q4_0": Format(gguf="Q4_0"),
    "q4_k_m": Format(gguf="Q4_K_M"),
}
AS_STORED = "bf16"
"""The format of the checkpoint that is made: nobody has to convert it but to the container that it reads."""


def weight_bits(name: str, checkpoint: Path, num_weights: int) -> float:
    """Bits of a weight in this format, scales included: of a GGUF file those that its matrices have on average."""
    its = FORMATS[name]
    if name == AS_STORED or not its.gguf:
        return its.bits
    return 8 * gguf_path(checkpoint, its.gguf).stat().st_size / num_weights


def gguf_path(checkpoint: Path, kind: str) -> Path:
    """Where the file of this kind is kept; `kind` is the name that llama-quantize has for the format."""
    return checkpoint / ("model.gguf" if kind == FORMATS[AS_STORED].gguf else f"model-{kind}.gguf")
