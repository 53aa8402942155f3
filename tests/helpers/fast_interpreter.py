"""A faster Triton interpreter: what it recomputes for every operation is computed once. Results stay the same."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder


def speed_up() -> None:
    """Patch the interpreter of this process, which makes it several times as fast."""
    _patch_language_once()
    _cache_types()
    # Overflow checks take long, and the noise hashes overflow on purpose.
    object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)


def _patch_language_once() -> None:
    """Triton patches triton.language at every call of a device function; the launch of the kernel has done it."""
    patch_and_call = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        is_patched = self.fn.__module__.startswith("retain") or core.full.__name__ == "<lambda>"
        return self.rewrite()(*args, **options) if is_patched else patch_and_call(self, *args, **options)

    InterpretedFunction.__call__ = call


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
