"""GGUF's tensor types: numbers and bytes per block."""

from typing import NamedTuple


class BlockType(NamedTuple):
    """A tensor type; rows of a tensor are sequences of its blocks."""

    number: int  # in files
    num_elements: int
    num_bytes: int


FLOATS = {"F32": BlockType(0, 1, 4), "F16": BlockType(1, 1, 2), "BF16": BlockType(30, 1, 2)}
"""Types of plain numbers; the names are those that safetensors has, too."""

BLOCK_TYPES = {
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
    "IQ4_NL": BlockType(20, 32, 18),
    "IQ4_XS": BlockType(23, 256, 136),
    "MXFP4": BlockType(39, 32, 17),
}
"""Supported quantized types."""

UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
"""Names of unsupported types by number, for messages."""

BY_NUMBER = {its.number: name for name, its in (FLOATS | BLOCK_TYPES).items()}
