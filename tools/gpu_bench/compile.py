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
    LOOK_CASES,
    STATE_CASES,
    launch_kernels,
    launch_llama_attention,
    launch_look_kernels,
    launch_state_kernels,
    launch_step_kernels,
)
from tools.gpu_bench.timing import Line
from tools.gpu_bench.weights import QUICK_WEIGHT_CASES, WEIGHT_CASES, launch_weight_kernels

COUNTED_KERNELS = ("attention_decode", "attention_prefill", "recompute_mass")


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
                **pool_dtypes(dict(zip(self.arg_names, args, strict=False)) | more),
            }

    JITFunction.run = only_compile
    for case in LAUNCH_CASES[: 6 if quick else None]:
        launch_kernels(*case, quick)
    launch_llama_attention(quick)
    for sizes in STATE_CASES[: 2 if quick else None]:
        launch_state_kernels(*sizes)
    for look in LOOK_CASES[: 3 if quick else None]:
        launch_look_kernels(*look)
    for kind, dtype in QUICK_WEIGHT_CASES if quick else WEIGHT_CASES:
        launch_weight_kernels(kind, dtype)
    launch_step_kernels()
    yield from lines.values()


def kernel_constants(args: dict[str, Any]) -> Line:
    """Return the compile-time options that tell the variants of a kernel apart."""
    names = (
        "D",
        "F",
        "H",
        "M",
        "R",
        "S",
        "TT",
        "HEADS",
        "PERIOD",
        "PART",
        "UPDATE_MASS",
        "NOISE",
        "ROPE",
        "DEMOTED_S",
        "N",
        "CHANGE",
        "NOISE_COLUMNS",
        "SOFTCAP",
        "SINKS",
        "FORMAT",
        "GROUP_EXTRA",
        "TOKENS",
        "SPLIT",
        "num_warps",
    )
    return {k: v for k, v in args.items() if k in names}


def pool_dtypes(args: dict[str, Any]) -> Line:
    """Return the dtypes of K and V as a kernel sees them: pairs of 8 bits are int16, or uint16 for floats."""
    return {name: str(args[name].dtype).removeprefix("torch.") for name in ("k", "v") if name in args}


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
        has_redux, is_counted = "redux.sync" in kernel.asm["ptx"], kernel.metadata.name in COUNTED_KERNELS
        sass = run_tool("-sass") if has_redux or is_counted else ""
    used = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert used, out
    ptx = kernel.asm["ptx"]
    return {
        "registers": int(used[1]), "spills": int(used[2]), "shared_memory_bytes": kernel.metadata.shared,
        "mma": len(re.findall(r"\bw?g?mma\.", ptx)), "async copies": ptx.count("cp.async.c"),
        "fused": ptx.count("fma.rn.f32"),
        "conditional reductions": len(re.findall(r"@!?U?P\d\s+REDUX", sass)),
        **(count_instructions(sass) if is_counted else {}),
    }  # fmt: skip


def count_instructions(sass: str) -> Line:
    """Return the instructions of a warp of attention or of its masses: in the innermost loop, and outside of it.

    Of decode attention these are those for a block, and what a split and a program add.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(\S.*?) *;", sass)
    indices = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    loops = []
    for i, (_, text) in enumerate(lines):
        target = re.search(r"BRA(?:\.\S+)? (?:\S+, )?0x([0-9a-f]+)$", text)
        begin = indices.get(int(target[1], 16), i) if target else i
        # HFMA2.MMA is no product of tensor cores: it loads constants.
        if any(re.search(r"\b[HIQ]G?MMA\b", x) for _, x in lines[begin:i]):
            loops.append(i - begin + 1)
    block, split = min(loops, default=0), max(loops, default=0)
    return {"block": block, "split": split - block, "program": len(lines) - split}
