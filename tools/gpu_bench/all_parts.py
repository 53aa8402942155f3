"""Run all parts one after another, each in a process of its own that ends at its limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Timer
from time import perf_counter

from tools.gpu_bench.timing import Line

TESTS = (
    "tests/kernels/test_triton.py",
    "tests/kernels/test_triton_decode.py",
    "tests/kernels/test_prefill.py",
    "tests/kernels/test_triton_weights.py",
    "tests/kernels/test_triton_experts.py",
    "tests/kernels/test_eviction.py",
    "tests/kernels/test_recorded_steps.py",
    "tests/kernels/test_backends.py",
    "tests/kernels/test_attention_mass.py",
    "tests/kernels/test_demoted.py",
    "tests/kernels/test_value_sizes.py",
    "tests/kernels/test_looked_slots.py",
    "tests/kernels/test_experts.py",
    "tests/kernels/test_linear_attention.py",
    "tests/kernels/test_recorded_states.py",
    "tests/models/test_programs.py",
    "tests/invariants/test_fake_device.py",
)
FAILED = re.compile(r"\b(?:FAILED|ERROR) (tests/.+?)(?: - (.*))?$")
KERNEL_PARTS = ("pools", "mass", "prompts", "evict", "weights", "experts", "states", "looks", "options")
SHORTEST = 10  # seconds: a part that has less left does not start
LONGEST_LINES = 20  # of the end of a part's output that is no result


@dataclass(frozen=True)
class Part:
    """A command, and its limit in seconds. `compiles` are commands that fill the caches of the compiler meanwhile."""

    command: Sequence[str]
    limit: float
    compiles: Sequence[Sequence[str]] = field(default=())


def list_parts(tool: Sequence[str], device: str, model: str, quick: bool) -> dict[str, Part]:
    """Return the parts, most important first; `tool` is the command of tools/gpu.py."""
    bench = [*tool, "--device", device, "--model", model, *(["--quick"] if quick else [])]
    budgets = bench if quick else [*tool, "--device", device, "--model", "random:mpt-7b"]
    small = ["--input-len", "128", "--output-len", "512"] if quick else []
    pool = ["--kv-memory", "1MiB"] if quick else []
    short = ["--speculate-input-len", "256"] if quick else []
    which = "triton or device or prefill"
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-vv",
        "-n",
        "8",
        "-k",
        which,
        "--tb=no",
        "-rfE",
        "-p",
        "tools.gpu_bench.failures",
    ]
    compiles = (
        [*bench, "--compile-only", *KERNEL_PARTS],
        [*bench, "--compile-only", "--kv-memory", "20GiB", "step"],
        [*budgets, "--compile-only", "--kv-memory", "12GiB", "decode"],
    )
    parts = {
        "tests": Part([*pytest, *TESTS], 110, compiles),
        "pools": Part([*bench, "pools"], 60),
        "mass": Part([*bench, "mass"], 40),
        "prompts": Part([*bench, "prompts"], 45),
        "step": Part([*bench, "step"], 90),
        "evict": Part([*bench, "evict"], 20),
        "weights": Part([*bench, "weights"], 50),
        "decode": Part([*budgets, *small, *pool, "decode"], 120),
        "speculate": Part([*bench, *short, "speculate"], 60),
        "experts": Part([*bench, "experts"], 35),
        "states": Part([*bench, "states"], 25),
        "looks": Part([*bench, "looks"], 40),
        "options": Part([*bench, "options"], 60),
        "peer": Part([*bench, *small, "peer"], 45),
    }
    if device == "cpu":
        del parts["tests"]
    return parts


def run_all(
    tool: Sequence[str], device: str, model: str, quick: bool, seconds: float, chosen: Sequence[str] | None
) -> Iterator[Line]:
    """Run the chosen parts. Yields the lines of a part as they come, then one with its exit status and seconds."""
    parts = list_parts(tool, device, model, quick)
    if unknown := [name for name in chosen or () if name not in parts]:
        sys.exit(f"gpu.py: no part {unknown[0]!r} on {device}: choose from {', '.join(parts)}")
    started = perf_counter()
    for name in chosen or parts:
        part = parts[name]
        left = seconds - (perf_counter() - started)
        if left < SHORTEST:
            yield {"part": name, "left out": f"{seconds:.0f} seconds are over"}
            continue
        others = [start(command) for command in part.compiles]
        try:
            yield from run_part(name, part.command, min(part.limit, left))
        finally:
            for process in others:
                stop(process)


def run_part(name: str, command: Sequence[str], limit: float) -> Iterator[Line]:
    """Run a part. Of tests there is a line for each that failed, as it comes; of other output the end."""
    started = perf_counter()
    process = start(command, subprocess.PIPE)
    assert process.stdout
    tail = deque[str](maxlen=LONGEST_LINES)
    failed: set[str] = set()
    explained: set[str] = set()  # those with a line
    with stopped_after(limit, process):
        for text in process.stdout:
            if text.startswith("{"):
                yield {"part": name, **json.loads(text)}
            elif found := FAILED.search(text.rstrip()):
                test, message = found.groups()
                if message and test not in explained:
                    explained.add(test)
                    yield {"part": name, "failed": test, "message": message[:200]}
                failed.add(test)
            elif " PASSED " not in text and " SKIPPED " not in text:
                tail.append(text.rstrip()[:300])
        status = process.wait()
    for test in sorted(failed - explained):
        yield {"part": name, "failed": test, "message": ""}
    took = perf_counter() - started
    over = {"limit": limit} if took >= limit else {}
    yield {"part": name, "exit": status, "seconds": took, **over, "tail": [text for text in tail if text]}


def start(command: Sequence[str], stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start a command in a group of processes of its own."""
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, text=True, process_group=0)


def stop(process: subprocess.Popen[str]) -> None:
    """Kill a process with those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def stopped_after(limit: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that takes longer, or that is not read to its end."""
    timer = Timer(limit, stop, [process])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if process.poll() is None:
            stop(process)
