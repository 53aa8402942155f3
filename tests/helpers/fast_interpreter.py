"""A faster Triton interpreter, whose products are the same on every machine.

What the interpreter recomputes for every operation is computed once, which changes no result.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    TensorHandle,
    interpreter_builder,
    interpreter_semantic,
)


def speed_up() -> None:
    """Patch the interpreter of this process: it becomes several times as fast, and no product asks a BLAS."""
    _patch_language_once()
    _cache_types()
    _cache_numbers()
    _shorten_operators()
    _multiply_in_order()
    # Overflow checks take long, and the noise hashes overflow on purpose.
    object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)


def _patch_language_once() -> None:
    """Triton patches triton.language at every launch and every call of a device function, and takes it back."""

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that a kernel calls it

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter_semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    def call_device_function(self: Any, *args: Any, **options: Any) -> Any:
        return self.rewrite()(*args, **options)

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    InterpretedFunction.__call__ = call_device_function


def _cache_types() -> None:
    """Cache what every operation computes of its types; a kernel has few shapes and dtypes."""
    np_dtype = interpreter._get_np_dtype

    @cache
    def block_fields(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        checked = core.block_type.__new__(core.block_type)
        init_block_type(checked, core.int32, list(shape))
        return checked.shape, checked.numel, f"<{checked.shape}, "

    @cache
    def tensor_fields(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(d) for d in shape])

    @cache
    def scalar_np_dtype(scalar: Any) -> Any:
        return np_dtype(scalar)

    def cached_init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, prefix = block_fields(tuple([getattr(d, "value", d) for d in shape]))
        self.name = f"{prefix}{element_ty}>"

    def cached_init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = tensor_fields(tuple(type.shape.values) if type.is_block() else ())

    def cached_np_dtype(type: Any) -> Any:
        return np_dtype(type) if isinstance(type.scalar, core.pointer_type) else scalar_np_dtype(type.scalar)

    init_block_type = core.block_type.__init__
    core.block_type.__init__ = cached_init_block_type
    core.tensor.__init__ = cached_init_tensor
    interpreter._get_np_dtype = cached_np_dtype


def _cache_numbers() -> None:
    """Cache numbers as tensors, and the dtype to which two operands are promoted."""
    constant, promote = TritonSemantic.scalar_constant, TritonSemantic.computation_type_impl

    @cache
    def known_constant(kind: type, value: Any, dtype: Any) -> Any:
        return constant(interpreter_semantic, value, dtype)

    def cached_constant(self: Any, value: Any, dtype: Any) -> Any:
        has_key = type(value) is int or value  # 0.0 and -0.0 are equal
        return known_constant(type(value), value, dtype) if has_key else constant(self, value, dtype)

    @cache
    def known_promotion(*args: Any) -> Any:
        return promote(interpreter_semantic, *args)

    TritonSemantic.scalar_constant = cached_constant
    TritonSemantic.computation_type_impl = lambda self, *args: known_promotion(*args)


def _shorten_operators() -> None:
    """Most operands of an operator have one dtype and one shape, or one is a number."""
    equal_dtypes, broadcast = core.dtype.__eq__, TritonSemantic.broadcast_impl_value
    check_operands = TritonSemantic.binary_op_type_checking_impl
    unchanged = {core.int1, core.int32, core.int64, core.float32}  # by an operator of two tensors

    def fast_broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = (tuple(x.type.shape.values) if x.type.is_block() else () for x in (lhs, rhs))
        if a and b and len(a) != len(b):
            return broadcast(self, lhs, rhs)
        shape = tuple(n if m == 1 else m for m, n in zip(a, b, strict=True)) if a and b else a or b
        return (lhs if a == shape else _expand(lhs, shape)), (rhs if b == shape else _expand(rhs, shape))

    def fast_check(self: Any, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if type(lhs) is core.tensor and type(rhs) is core.tensor and lhs.dtype is rhs.dtype and lhs.dtype in unchanged:
            return fast_broadcast(self, lhs, rhs)
        return check_operands(self, lhs, rhs, *args, **options)

    core.dtype.__eq__ = lambda self, other: self is other or equal_dtypes(self, other)
    TritonSemantic.broadcast_impl_value = fast_broadcast
    TritonSemantic.binary_op_type_checking_impl = fast_check


def _multiply_in_order() -> None:
    """Give a row of a product the bits that it has alone, as a GPU does.

    The interpreter asks a BLAS, where they follow from the number of rows: most do so without AVX-512, few with it.
    """
    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or any(x.dtype.is_floating() and x.dtype.primitive_bitwidth == 8 for x in (a, b)):
            return multiply(self, a, b, d, *options)
        return TensorHandle(multiply_in_order(a.data, b.data) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def multiply_in_order(a: Any, b: Any) -> Any:
    """Return a @ b [M, N] in float32, where each element is a sum in the order of the K products."""
    a, b = (np.ascontiguousarray(x, dtype=np.float32) for x in (a, b))
    if b.shape[-1] == 1:  # einsum would add a single column in another order than one of several
        return multiply_in_order(a, np.concatenate((b, b), -1))[..., :1]
    return np.einsum("...mk,...kn->...mn", a, b)


def _expand(x: Any, shape: tuple[int, ...]) -> Any:
    """Repeat a tensor until it has this shape; sizes that do not fit are errors."""
    data = np.empty(shape, x.handle.data.dtype)
    data[...] = x.handle.data
    return core.tensor(TensorHandle(data, x.dtype), core.block_type(x.dtype, shape))
