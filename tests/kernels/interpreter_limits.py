"""Where Triton's interpreter cannot run, and what it cannot compute."""

import inspect
import os

import numpy as np
import torch
import triton
from triton.runtime import interpreter

_NEW_NUMPY = (2, 5)  # from here on, an array with a dimension is no integer


def why_not(numpy_version: str = np.__version__, source: str | None = None) -> str:
    """Why the interpreter of this Triton cannot run with this numpy; empty if it can.

    Args:
        numpy_version: as numpy says it.
        source: of the interpreter, if not that of the installed one.
    """
    numbers = tuple(int(part) for part in numpy_version.split(".")[:2])
    if numbers < _NEW_NUMPY or "int(self.handle.data))" not in (source or inspect.getsource(interpreter)):
        return ""
    return f"the interpreter of triton {triton.__version__} needs numpy < 2.5, and this is {numpy_version}"


def dtypes() -> list[torch.dtype]:
    """What kernels are tested in: on a GPU all; the interpreter's dot product is wrong for bf16."""
    is_on_gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    return [torch.float32, torch.float16, *([torch.bfloat16] if is_on_gpu else [])]
