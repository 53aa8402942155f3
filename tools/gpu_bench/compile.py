"""Compile every kernel for a GPU that is not there: registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu_bench.launches import (
    LAUNCH_CASES,
    STATE_CASES,
    launch_kernels,
    launch_state_kernels,
    launch_step_kernels,
)
from tools.gpu_bench.timing import Line
from tools.gpu_bench.weights import QUICK_WEIGHT_CASES, WEIGHT_CASES, launch_weight_kernels


def compile_kernels(arch: int, quick: bool) -> Iterator[Line]:
    """Give the registers, spills and shared memory of every kernel that the launch cases use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoGPU:
        """A driver that names the target of the compiler and nothing else."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(NoGPU())
    lines: dict[int, Line] = {}  # by kernel
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **more)
        if id(kernel) not in lines:
            lines[id(kernel)] = {
                "kernel": self.fn.__name__,
                **kernel_usage(kernel, Path(triton.__file__).parent),
                **kernel_constants(more),
            }

    JITFunction.run = only_compile
    for case in LAUNCH_CASES[: 6 if quick else None]:
        launch_kernels(*case, quick)
    for sizes in STATE_CASES[: 2 if quick else None]:
        launch_state_kernels(*sizes)
    for kind, dtype in QUICK_WEIGHT_CASES if quick else WEIGHT_CASES:
        launch_weight_kernels(kind, dtype)
    launch_step_kernels()
    yield from lines.values()


def kernel_constants(options: dict[str, Any]) -> Line:
    """Return the compile-time options that tell the variants of a kernel apart."""
    names = (
        "D",
        "F",
        "H",
        "M",
        "R",
        "PART",
        "UPDATE_MASS",
        "NOISE",
        "ROPE",
        "DEMOTED_S",
        "N",
        "CHANGE",
        "SOFTCAP",
        "SINKS",
        "FORMAT",
        "GROUP_EXTRA",
        "TOKENS",
        "SPLIT",
        "num_warps",
    )
    return {k: v for k, v in options.items() if k in names}


def kernel_usage(kernel: Any, triton: Path) -> Line:
    """Return the resources of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        tool = triton / "backends/nvidia/bin/cuobjdump"

        def run_tool(option: str) -> str:
            done = subprocess.run([str(tool), option, f.name], capture_output=True, text=True, check=True)
            return done.stdout + done.stderr

        out = run_tool("-res-usage")
        # What is looked for in the instructions takes seconds.
        has_redux, has_loop = "redux.sync" in kernel.asm["ptx"], kernel.metadata.name == "attention_decode"
        sass = run_tool("-sass") if has_redux or has_loop else ""
    used = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert used, out
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(used[1]), "spills": int(used[2]), "shared_memory_bytes": kernel.metadata.shared,
        "mma": len(re.findall(r"\bw?g?mma\.", ptx)), "async copies": ptx.count("cp.async.c"),
        "fused": ptx.count("fma.rn.f32"),
        "conditional reductions": len(re.findall(r"@!?U?P\d\s+REDUX", sass)),
        **({"loop": shortest_loop(sass)} if has_loop else {}),
    }  # fmt: skip


def shortest_loop(sass: str) -> int:
    """Return the instructions of the shortest loop that has products: that over the blocks of slots."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(\S.*?) *;", sass)
    indices = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (_, text) in enumerate(lines):
        target = re.search(r"BRA(?:\.\S+)? (?:\S+, )?0x([0-9a-f]+)$", text)
        begin = indices.get(int(target[1], 16), i) if target else i
        if any("MMA" in x for _, x in lines[begin:i]):
            loops.append(i - begin + 1)
    return min(loops)
