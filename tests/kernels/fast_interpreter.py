"""Triton's interpreter, without what makes it slow: what it does again at every call, and loops over numbers."""

from typing import Any

import numpy as np
import triton.language.core as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from penstock.kernels.triton.sampling.sampling import larger_or_nan
from penstock.kernels.triton.sampling.search import sum_least_most


def speed_up_interpreter() -> None:
    """Everything below: what kernels compute stays as it is."""
    _patch_modules_once()
    _reduce_in_numpy()
    _skip_unread_checks()
    _remember_shapes()
    _remember_types()


def _patch_modules_once() -> None:
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


def _reduce_in_numpy() -> None:
    apply_impl = interpreter.ReduceOps.apply_impl

    def reduce(self: interpreter.ReduceOps, input: Any) -> Any:
        if self.combine_fn is larger_or_nan:
            return self.min_max(input[0], val_reduce_op=np.max)
        if self.combine_fn is sum_least_most:
            return self.sum(input[0]), self.min_max(input[1], np.min), self.min_max(input[2], np.max)
        return apply_impl(self, input)

    interpreter.ReduceOps.apply_impl = reduce


def _skip_unread_checks() -> None:
    """Every operation on integers is done again in 64 bits, for an assertion that only debug mode makes."""
    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_in_debug_mode(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_in_debug_mode


def _remember_shapes() -> None:
    """A shape is a tuple of wrapped integers with a type of its own, which is made and checked for every value."""
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        known = of_types.get(sizes)
        if known is None:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = known
            self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if isinstance(type, tl.block_type) else ()
        known = of_tensors.get(sizes)
        if known is None:
            make_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    def broadcast_to_each_other(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        blocks = [isinstance(each.type, tl.block_type) for each in (lhs, rhs)]
        if not any(blocks) or (all(blocks) and lhs.type.shape.values == rhs.type.shape.values):
            return lhs, rhs
        both: tuple[Any, Any] = broadcast(self, lhs, rhs)
        return both

    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast_to_each_other


def _remember_types() -> None:
    """The table from Triton's types to numpy's is made anew for each question, and so is the answer about two types."""
    numpy_type, common_type, cast = interpreter._get_np_dtype, TritonSemantic.computation_type_impl, TritonSemantic.cast
    of_numpy: dict[str, Any] = {}
    common: dict[tuple[str, bool, str, bool, bool], Any] = {}

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in of_numpy:
            of_numpy[name] = numpy_type(kind)
        return of_numpy[name]

    def computation_type(self: Any, one: Any, is_scalar: bool, other: Any, other_is_scalar: bool, div: bool) -> Any:
        key = one.name, is_scalar, other.name, other_is_scalar, div
        if key not in common:
            common[key] = common_type(self, one, is_scalar, other, other_is_scalar, div)
        return common[key]

    def cast_if_different(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.type.scalar is dst_ty.scalar:
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    interpreter._get_np_dtype = get_np_dtype
    TritonSemantic.computation_type_impl = computation_type
    TritonSemantic.cast = cast_if_different
