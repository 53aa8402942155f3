"""Run all parts one after another, each in a process of its own that ends at its limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Timer
from time import perf_counter

from tools.gpu_bench.timing import Line

# What failed on a GPU in the last run of the tests there: see docs/benchmarks/gpu.md.
FAILED_TESTS = (
    "tests/kernels/test_backends.py::test_write_rounds_as_torch_does",
    "tests/kernels/test_triton.py::test_attention_matches_reference[values of another size, int8]",
)
ATTENTION_TESTS = (
    "tests/kernels/test_triton.py",
    "tests/kernels/test_triton_decode.py",
    "tests/kernels/test_prefill.py",
    "tests/kernels/test_eviction.py",
    "tests/kernels/test_recorded_steps.py",
    "tests/kernels/test_backends.py",
    "tests/kernels/test_attention_mass.py",
    "tests/kernels/test_demoted.py",
    "tests/kernels/test_value_sizes.py",
    "tests/kernels/test_looked_slots.py",
)
OTHER_TESTS = (
    "tests/kernels/test_triton_weights.py",
    "tests/kernels/test_triton_experts.py",
    "tests/kernels/test_experts.py",
    "tests/kernels/test_linear_attention.py",
    "tests/kernels/test_recorded_states.py",
    "tests/models/test_programs.py",
    "tests/invariants/test_fake_device.py",
)
QUICK_TESTS = ("tests/kernels/test_noise_factors.py",)
FAILED = re.compile(r"\b(?:FAILED|ERROR) (tests/.+?)(?: - (.*))?$")
KERNEL_PARTS = ("pools", "mass", "prompts", "options", "weights", "experts", "states", "looks", "evict")
LLAMA_POOL = "24GiB"  # so that the prompts of its largest batches are not most of the time
ROOT = Path(__file__).parents[2]
WHICH_TESTS = "triton or device or prefill or noise"
QUICK_FACTOR = 3  # on the limits of quick parts, which other work may slow down on a CPU
LONGEST_LINES = 20  # of the end of a part's output that is no result


@dataclass(frozen=True)
class Part:
    """A command, and its limit in seconds.

    `compiles` are commands that fill the caches of the compiler meanwhile. A part that `resumes` leaves out what an
    earlier call of it has measured.
    """

    command: Sequence[str]
    limit: float
    compiles: Sequence[Sequence[str]] = field(default=())
    resumes: bool = False


def list_parts(tool: Sequence[str], device: str, model: str, quick: bool, done: Path | None = None) -> dict[str, Part]:
    """Return the parts, most important first. `tool` is the command of tools/gpu.py; `done` has lines of before."""
    own = [*tool, "--device", device]
    bench = [*own, "--model", model, *(["--quick"] if quick else [])]
    mpt = bench if quick else [*own, "--model", "random:mpt-7b"]
    small = ["--input-len", "128", "--output-len", "512"] if quick else []
    pool = ["--kv-memory", "1MiB"] if quick else []
    llama_pool = pool or ["--kv-memory", LLAMA_POOL]
    short = ["--speculate-input-len", "256"] if quick else []
    before = ["--skip-done", str(done.resolve())] if done else []
    compiles = [
        [*bench, "--compile-only", *KERNEL_PARTS],
        [*mpt, "--compile-only", "--kv-memory", "12GiB", "decode"],
        [*bench, "--compile-only", "--kv-memory", "20GiB", "step"],
    ]
    if device == "cpu":
        compiles = []
    parts = {
        "failed-tests": Part(test_command(FAILED_TESTS, device), 40, compiles),
        "tests": Part(test_command(QUICK_TESTS if quick else ATTENTION_TESTS, device), 90, compiles),
        "other-tests": Part(test_command(QUICK_TESTS if quick else OTHER_TESTS, device), 90, compiles),
        "budgets-mpt": Part([*mpt, *small, *pool, *before, "decode"], 110, resumes=True),
        "budgets-llama": Part([*bench, *small, *llama_pool, *before, "decode"], 100, resumes=True),
        "pools": Part([*bench, "pools"], 45),
        "mass": Part([*bench, "mass"], 30),
        "prompts": Part([*bench, "prompts"], 40),
        "options": Part([*bench, "options"], 40),
        "step": Part([*bench, "step"], 65),
        "speculate": Part([*bench, *short, "speculate"], 45),
        "weights": Part([*bench, "weights"], 40),
        "experts": Part([*bench, "experts"], 25),
        "states": Part([*bench, "states"], 20),
        "looks": Part([*bench, "looks"], 30),
        "evict": Part([*bench, "evict"], 15),
        "peer": Part([*bench, *small, "peer"], 30),
    }
    return {name: replace(part, limit=QUICK_FACTOR * part.limit) for name, part in parts.items()} if quick else parts


def test_command(tests: Sequence[str], device: str) -> list[str]:
    """Return pytest's command: of a part of the tests, those that use the device."""
    pytest = [sys.executable, "-m", "pytest", "-vv", "--tb=no", "-rfE", "-p", "tools.gpu_bench.failures"]
    pytest = ["env", "-C", str(ROOT), *pytest]  # names of tests are relative to it
    return [*pytest, "-n", "2" if device == "cpu" else "8", "-k", WHICH_TESTS, *tests]


def run_all(
    parts: Mapping[str, Part], seconds: float, chosen: Sequence[str] | None, done: Sequence[Line] = ()
) -> Iterator[Line]:
    """Run the chosen parts. Yields the lines of a part as they come, then one with its exit status and seconds.

    A part begins only where its limit is left of the seconds; shorter ones behind it may. Those that `done` lines say
    have ended are left out.
    """
    if unknown := [name for name in chosen or () if name not in parts]:
        sys.exit(f"gpu.py: no part {unknown[0]!r}: choose from {', '.join(parts)}")
    started = perf_counter()
    for name in chosen or parts:
        part = parts[name]
        if has_ended(name, part, done):
            yield {"part": name, "left out": "an earlier call has run it"}
            continue
        left = seconds - (perf_counter() - started)
        if left < part.limit:
            yield {"part": name, "left out": f"may take {part.limit:.0f} of the {max(left, 0):.0f} seconds left"}
            continue
        others = [start(command) for command in part.compiles]
        try:
            yield from run_part(name, part.command, part.limit)
        finally:
            for process in others:
                stop(process)


def has_ended(name: str, part: Part, done: Sequence[Line]) -> bool:
    """Return whether lines say that a part has run to its end, or, where it cannot resume, to its limit.

    Of tests an end with failures counts, too.
    """
    ends = [line for line in done if line.get("part") == name and "exit" in line]
    is_test = any(x.startswith("tests/") for x in part.command)
    return any(
        not part.resumes if "limit" in line else line["exit"] == 0 or (is_test and line["exit"] == 1) for line in ends
    )


def read_lines(file: Path | None) -> list[Line]:
    """Return the lines of earlier calls; one that was cut is left out."""
    lines: list[Line] = []
    for text in file.read_text(encoding="utf-8").splitlines() if file and file.is_file() else ():
        with suppress(ValueError):
            line = json.loads(text)
            lines += [line] if isinstance(line, dict) else []
    return lines


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
