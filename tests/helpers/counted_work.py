"""Counts of work: calls and lines of Python, and bytes that are allocated. They are the same on every machine."""

import sys
import tracemalloc
from collections.abc import Callable, Collection
from types import FrameType, ModuleType
from typing import Any, NamedTuple


class Work(NamedTuple):
    """Steps that were run, and bytes that were allocated meanwhile: a copy that grows costs bytes and no step."""

    num_steps: int
    num_bytes: int


def count_work(function: Callable[[], object], modules: Collection[ModuleType]) -> Work:
    """Return the work of a call in this thread. Steps are lines of these modules, and calls of any function."""
    files = {module.__file__ for module in modules}
    num_steps = num_bytes = present = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_steps, num_bytes, present
        num_steps += 1
        now, peak = tracemalloc.get_traced_memory()
        num_bytes += max(peak - present, 0)  # since the last event
        tracemalloc.reset_peak()
        present = now
        return trace if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    tracemalloc.start()
    try:
        sys.settrace(trace)
        function()
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    return Work(num_steps, num_bytes)


def assert_linear(prepare: Callable[[int], Callable[[], object]], size: int, modules: Collection[ModuleType]) -> None:
    """Check that work on an input of twice the size is about twice as much.

    `prepare` returns a function that does the work on an input of some size. Its first call is not counted.
    """
    prepare(1)()
    once, twice = (count_work(prepare(n), modules) for n in (size, 2 * size))
    assert twice.num_steps <= 2.1 * once.num_steps, (once, twice)
    assert twice.num_bytes <= 2.1 * once.num_bytes + 2**12, (once, twice)
