"""Before torch: threads stay on their cores, as `retain` runs them (docs/log/engine.md tells why). And what rooms share."""

import os

if hasattr(os, "sched_getaffinity"):
    # `pytest -n`: each worker, and what it starts, has a core of its own. Who starts them is bound to one by OpenMP.
    cores = os.environ.setdefault("TEST_CORES", ",".join(map(str, sorted(os.sched_getaffinity(0))))).split(",")
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        os.sched_setaffinity(0, {int(cores[int(worker.removeprefix("gw")) % len(cores)])})
os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from retain.kernels import cpu, triton

if triton.is_interpreted():
    # What it does for every call of a function inside a kernel, it does once: half of its time.
    from triton.language import core
    from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

    thorough = InterpretedFunction.__call__

    def call(self, *args, **more):
        known = self.fn.__module__.startswith("retain") or core.full.__name__ == "<lambda>"
        return self.rewrite()(*args, **more) if known else thorough(self, *args, **more)

    InterpretedFunction.__call__ = call
    object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)  # the other half; and hashes overflow


@pytest.fixture(params=cpu._C.isas() if cpu.unavailable_reason() is None else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that the cpu backend has here."""
    before = cpu._C.isa()
    cpu._C.set_isa(request.param)
    yield request.param
    cpu._C.set_isa(before)
