"""A program that counts what a GPU would compile for requests of many lengths and numbers. It needs no GPU.

    TRITON_INTERPRET=0 python -m tests.helpers.compiled_variants POLICY

Prints a JSON object: for each kernel the variants, and the sets of constants and dtypes that its launches have.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

BATCHES = ((1, 5), (1, 40), (3, 100), (9, 17), (40, 30), (64, 7), (2, 700))  # requests, and tokens of their prompts


class NoGPU:
    """A driver that names the target of the compiler and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def count_variants(policy: str) -> dict[str, tuple[int, int]]:
    """Run requests in an engine whose kernels compute nothing."""
    variants: dict[str, set[str]] = defaultdict(set)
    constants: dict[str, set[str]] = defaultdict(set)
    run = JITFunction.run

    def record(self: Any, key: Any, *args: Any, **more: Any) -> None:
        variants[self.fn.__name__].add(str(key))

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        dtypes = [x.dtype for x in args if isinstance(x, torch.Tensor)]
        constants[self.fn.__name__].add(str((dtypes, sorted(more.items()))))
        return run(self, *args, grid=grid, warmup=True, **more)

    driver.set_active(NoGPU())
    JITFunction._do_compile = record
    JITFunction.run = launch
    # Memory that no kernel writes must be finite.
    torch.empty = torch.zeros  # type: ignore[assignment]
    torch.empty_like = torch.zeros_like  # type: ignore[assignment]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[assignment, method-assign]

    from retain.kernels import triton
    from tests.helpers.engines import make_engine, make_request

    triton.unavailable_reason = lambda: None
    triton.DEVICES = ("cpu",)
    cpu = torch.device("cpu")
    engine = make_engine("llama", backend="triton", device=cpu, dtype=torch.bfloat16, max_model_len=1024)
    for num_requests, length in BATCHES:
        engine.add(*(make_request([3 + i, *[7] * (length - 1)], 5, policy) for i in range(num_requests)))
        while engine.has_unfinished_requests:
            engine.step()
    return {name: (len(variants[name]), len(constants[name])) for name in constants}


if __name__ == "__main__":
    print(json.dumps(count_variants(sys.argv[1])))
