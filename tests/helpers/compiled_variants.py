"""A program that counts what a GPU would compile for requests of many lengths and numbers. It needs no GPU.

    TRITON_INTERPRET=0 python -m tests.helpers.compiled_variants POLICY
    TRITON_INTERPRET=0 python -m tests.helpers.compiled_variants --after-warm-up POLICY

Prints a JSON object: for each kernel the variants, and the sets of constants and dtypes that its launches have; or the
variants that a server compiles for its first requests although it has warmed up.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:  # kernels are imported behind the driver
    from retain.engine.engine import Engine

BATCHES = ((1, 5), (1, 40), (3, 100), (9, 17), (40, 30), (64, 7), (2, 700))  # requests, and tokens of their prompts


class NoGPU:
    """A driver that names the target of the compiler and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


Variants = dict[str, set[str]]  # by kernel


def record_launches() -> tuple[Variants, Variants]:
    """Let kernels compute nothing; return what will be compiled, and the constants and dtypes of launches."""
    variants: Variants = defaultdict(set)
    constants: Variants = defaultdict(set)
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

    triton.unavailable_reason = lambda: None
    triton.DEVICES = ("cpu",)
    return variants, constants


def run_batches(engine: Engine, policy: str) -> None:
    """Run requests of many lengths and numbers."""
    from tests.helpers.engines import make_request

    for num_requests, length in BATCHES:
        engine.add(*(make_request([3 + i, *[7] * (length - 1)], 5, policy) for i in range(num_requests)))
        while engine.has_unfinished_requests:
            engine.step()


def count_variants(policy: str) -> dict[str, tuple[int, int]]:
    """Run requests in an engine whose kernels compute nothing."""
    variants, constants = record_launches()
    from tests.helpers.engines import make_engine

    cpu = torch.device("cpu")
    run_batches(make_engine("llama", backend="triton", device=cpu, dtype=torch.bfloat16, max_model_len=1024), policy)
    return {name: (len(variants[name]), len(constants[name])) for name in constants}


def variants_after_warm_up(policy: str) -> dict[str, list[str]]:
    """Return what the same requests compile in a server that has warmed up."""
    variants, _ = record_launches()
    from retain import LLM

    llm = LLM("random:tiny", backend="triton", device="cpu", kv_policy=policy, kv_memory="64MiB", max_model_len=1024)
    llm.engine.depth = 2
    llm.device = torch.device("meta")  # anything but a CPU, which does not warm up
    llm.warm_up()
    compiled = {name: found.copy() for name, found in variants.items()}
    run_batches(llm.engine, policy)
    new = {name: sorted(found - compiled.get(name, set())) for name, found in variants.items()}
    return {name: found for name, found in new.items() if found}


if __name__ == "__main__":
    *options, policy = sys.argv[1:]
    print(json.dumps(variants_after_warm_up(policy) if options else count_variants(policy)))
