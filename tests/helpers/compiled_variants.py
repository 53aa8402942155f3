"""A program that counts what a GPU would compile for requests of many lengths and numbers. It needs no GPU.

    TRITON_INTERPRET=0 python -m tests.helpers.compiled_variants POLICY
    TRITON_INTERPRET=0 python -m tests.helpers.compiled_variants --after-warm-up POLICY [OPTION=VALUE ...]

Prints a JSON object: for each kernel the variants, and the sets of constants and dtypes that its launches have; or what
a server with these options compiles when it is launched, although all should be compiled ahead, and how many are.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:  # kernels are imported behind the driver
    from retain.engine.engine import Engine

# Requests, and tokens of their prompts.
BATCHES = ((1, 5), (1, 40), (3, 100), (9, 17), (20, 20), (40, 9), (70, 4), (2, 700))
NUM_TOKENS = 20  # of an answer: longer than the interval of most budgets


class NoGPU:
    """A driver that names the target of the compiler and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


Variants = dict[str, set[str]]  # by kernel


def record_launches() -> tuple[Variants, Variants, Variants]:
    """Let kernels compute nothing; return what is compiled ahead, and at launches, and the constants of launches."""
    ahead: Variants = defaultdict(set)
    at_launch: Variants = defaultdict(set)
    constants: Variants = defaultdict(set)
    run = JITFunction.run

    def record(src: Any, target: GPUTarget, options: Any, **more: Any) -> object:
        variants = at_launch if current_thread() is main_thread() else ahead
        names = list(src.signature)
        constants = {".".join((names[i], *map(str, more))): str(value) for (i, *more), value in src.constants.items()}
        types = {name: kind for name, kind in src.signature.items() if name not in constants}
        aligned = [names[i] for (i, *_), value in src.attrs.items() if value]
        variants[src.fn.fn.__name__].add(str((constants, options["num_warps"], options["maxnreg"], types, aligned)))
        return object()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False)) | more
        varies = {p.name for p in self.params if not p.is_constexpr}
        dtypes = sorted((name, str(x.dtype)) for name, x in given.items() if isinstance(x, torch.Tensor))
        fixed = sorted((name, str(x)) for name, x in given.items() if name not in varies)
        constants[self.fn.__name__].add(str((dtypes, fixed)))
        return run(self, *args, grid=grid, warmup=True, **more)

    driver.set_active(NoGPU())
    triton.compiler.compile = record
    JITFunction.run = launch

    from retain.kernels import triton as backend
    from retain.kernels.triton.compilation import ZeroedMemory

    ZeroedMemory().__enter__()
    backend.unavailable_reason = lambda: None
    backend.DEVICES = ("cpu",)
    return ahead, at_launch, constants


def run_batches(engine: Engine, policy: str) -> None:
    """Run requests of many lengths and numbers."""
    from tests.helpers.engines import make_request

    for num_requests, length in BATCHES:
        engine.add(*(make_request([3 + i, *[7] * (length - 1)], NUM_TOKENS, policy) for i in range(num_requests)))
        while engine.has_unfinished_requests:
            engine.step()


def count_variants(policy: str) -> dict[str, tuple[int, int]]:
    """Run requests in an engine whose kernels compute nothing."""
    _, variants, constants = record_launches()
    from tests.helpers.engines import make_engine

    cpu = torch.device("cpu")
    run_batches(make_engine("llama", backend="triton", device=cpu, dtype=torch.bfloat16, max_model_len=1024), policy)
    return {name: (len(variants[name]), len(constants[name])) for name in constants}


def variants_after_warm_up(policies: list[str], options: dict[str, str]) -> dict[str, Any]:
    """Return what a server compiles at launches, those of its warm-up and of the same requests."""
    ahead, at_launch, _ = record_launches()
    from retain import LLM

    small: dict[str, Any] = {"model": "random:tiny", "kv_memory": "64MiB", "max_model_len": 1024} | options
    llm = LLM(backend="triton", device="cpu", kv_policy=policies[0], allow_policy=policies[1:], **small)
    llm.engine.depth = 2
    llm.device = torch.device("meta")  # anything but a CPU, which does not warm up
    llm.warm_up()
    for policy in policies:
        run_batches(llm.engine, policy)
    return {"at_launch": {k: sorted(v) for k, v in at_launch.items()}, "ahead": {k: len(v) for k, v in ahead.items()}}


if __name__ == "__main__":
    if sys.argv[1] == "--after-warm-up":
        given = dict(arg.split("=", 1) for arg in sys.argv[3:])
        print(json.dumps(variants_after_warm_up(sys.argv[2].split(";"), given)))
    else:
        print(json.dumps(count_variants(sys.argv[1])))
