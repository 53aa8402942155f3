"""Kernels compiled in threads before they are launched.

The caller computes steps whose launches are skipped. Each launch names a variant of a kernel, which begins to compile
beside the steps. What was compiled stays in Triton's cache on the disk (TRITON_CACHE_DIR), for this process and others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

from retain.garbage_collection import without_garbage_collection
from retain.threads import available_cores, reset_cpu_affinity

log = logging.getLogger(__name__)
MAX_THREADS = 16  # Python's part of compiling, a tenth, is done by one thread at a time
PROGRESS_S = 2.0  # between two lines of the log
ZEROS = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, torch.Tensor.new_empty: torch.Tensor.new_zeros}


def compile_ahead(compute: Callable[[], None]) -> None:
    """Compile all variants of kernels that `compute` would launch. Raises ValueError for one that does not compile.

    `compute` runs in the current thread. Its launches are skipped, so what they would have written is zeros.

    No garbage is collected meanwhile: Python 3.11.0 to 3.11.7 fails to parse source in two threads when a collection
    lets another thread run (CPython's issue 106905).
    """
    if triton.knobs.runtime.interpret:
        return
    with (
        without_garbage_collection(),
        Compiler(min(len(available_cores()), MAX_THREADS)) as compiler,
        triton.AsyncCompileMode(compiler, ignore_errors=True),  # `wait` raises them, at the first one
    ):
        try:
            with compiler.skipped_launches(), ZeroedMemory():
                compute()
            compiler.wait()
        except BaseException:
            compiler.is_stopped = True
            raise


def first_and_last(error: BaseException) -> str:
    """Return the beginning and the end of an error in one line: ptxas begins with its reason, Triton ends with it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"


class ZeroedMemory(TorchFunctionMode):
    """Lets torch's uninitialized tensors be zeros, which are valid indices, and finite."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ZEROS.get(func, func)(*args, **(kwargs or {}))


class Compiler(ThreadPoolExecutor):
    """Threads that compile kernels, and the names of these kernels."""

    def __init__(self, num_threads: int):
        super().__init__(num_threads, "retain-compile", reset_cpu_affinity)
        self.kernels: dict[Future[Any], str] = {}
        self.is_stopped = False  # what has not begun is left out; Triton would wait for ever for cancelled futures
        self._launched = ""  # the kernel that is launched now
        self._started = perf_counter()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compile a variant of the kernel that is launched now."""

        def run() -> Any:
            if self.is_stopped:
                raise CancelledError
            return fn(*args, **kwargs)

        future = super().submit(run)
        self.kernels[future] = self._launched
        return future

    @contextmanager
    def skipped_launches(self) -> Iterator[None]:
        """Let launches inside of the block compile their kernels, and compute nothing."""
        launch = triton.KernelInterface.__getitem__

        def skip(kernel: Any, grid: Any) -> Callable[..., None]:
            def compile_variant(*args: Any, **constants: Any) -> None:
                self._launched = kernel.fn.__name__
                kernel.warmup(*args, grid=grid, **constants)

            return compile_variant

        triton.KernelInterface.__getitem__ = skip
        try:
            yield
        finally:
            triton.KernelInterface.__getitem__ = launch

    def wait(self) -> None:
        """Wait until all are compiled, and log how far it is. Raises ValueError for one that cannot be compiled."""
        logged_at = perf_counter()
        for num_compiled, future in enumerate(as_completed(self.kernels), 1):
            if error := future.exception():
                raise ValueError(f"kernel {self.kernels[future]} does not compile: {first_and_last(error)}") from error
            now = perf_counter()
            if num_compiled == len(self.kernels) or now - logged_at >= PROGRESS_S:
                logged_at = now
                log.info("compiled %d of %d kernels, %.1f s", num_compiled, len(self.kernels), now - self._started)
