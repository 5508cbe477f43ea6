"""Triton's interpreter, without what makes it slow: a set-up at every call, and reductions number by number."""

from typing import Any

import numpy as np
from triton.runtime import interpreter

from penstock.kernels.triton.sampling.sampling import larger_or_nan


def speed_up_interpreter() -> None:
    """Let nested device functions skip a repeated set-up.

    The interpreter patches `triton.language` again at every call of a device function, `tl.max` included, which
    takes most of its time. Once per module is enough: only a launch from the host undoes a patch, and it
    does so for `triton.language` itself, which that launch has patched before.
    """
    patched: set[str] = set()

    def call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    apply_impl = interpreter.ReduceOps.apply_impl

    def reduce(self: interpreter.ReduceOps, input: Any) -> Any:
        if self.combine_fn is larger_or_nan:
            return self.min_max(input[0], val_reduce_op=np.max)
        return apply_impl(self, input)

    interpreter.ReduceOps.apply_impl = reduce
