"""What products of quantized weights are, to the last bit: python -m tests.kernels.quantized_bits LIBRARY"""

import hashlib
import sys
from pathlib import Path

import torch

from penstock.kernels.native.library import Library
from tests.kernels.native.native_library import native_linear
from tests.kernels.quantized_cases import LAYOUTS


def digest(path: Path) -> str:
    """Of all layouts, by one library. (A process must load no other one: they share symbols.)"""
    library, found = Library(path, 2, worth_waking=0), hashlib.sha256()
    for make in LAYOUTS.values():
        for num_inputs in (544, 101):
            torch.manual_seed(0)
            packed = library.pack_quantized(make(100, num_inputs), torch.randn(100), rounds_inputs=True)
            x = torch.randn(40, num_inputs)
            for num_tokens in (1, 5, 17, 40):
                outputs = native_linear(library, packed, x[:num_tokens])
                found.update(outputs[:, :100].contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    print(digest(Path(sys.argv[1])))
