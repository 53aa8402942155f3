"""A program that compiles small kernels ahead for a GPU that is not there.

    TRITON_INTERPRET=0 python -m tests.helpers.compiled_ahead

Prints a JSON object: which kernels Triton's cache on the disk had, the log, and the error of a kernel that is wrong.
"""

from __future__ import annotations

import gc
import json
import logging
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from retain.kernels.triton.compilation import compile_ahead
from tests.helpers.compiled_variants import NoGPU


@triton.jit
def fill(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write ones."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, 1.0, mask=i < n)


@triton.jit
def broken(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Use a name that does not exist."""
    tl.store(x + tl.arange(0, BLOCK), no_such_name)  # type: ignore[name-defined]  # noqa: F821


def launch(kernel: Any, sizes: range) -> None:
    """Launch each variant twice, on memory that must stay as it is."""
    for block in (2**i for i in sizes for _ in range(2)):
        x = torch.empty(block)
        kernel[(1,)](x, *([block] if kernel is fill else []), BLOCK=block)
        assert not x.any()


def main() -> None:
    """Compile, and print what happened."""
    driver.set_active(NoGPU())
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **more: hits.append(cache_hit)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("retain").addHandler(handler)
    logging.getLogger("retain").setLevel(logging.INFO)
    compile_ahead(lambda: launch(fill, range(5, 9)))
    error = ""
    try:
        compile_ahead(lambda: launch(broken, range(5, 9)))
    except ValueError as caught:
        error = str(caught)
    compile_ahead(lambda: launch(fill, range(5, 9)))  # nothing is left to compile
    print(json.dumps({"hits": hits, "log": messages, "error": error, "collects": gc.isenabled()}))


if __name__ == "__main__":
    main()
