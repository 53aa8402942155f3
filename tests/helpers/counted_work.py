"""Counts of work that are alike on any machine: bytecode of `retain`, bytes allocated, and characters read."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, NamedTuple

MAX_GROWTH = 2.1  # of each count for an input of twice the size: 2 where work is linear, 4 where it is quadratic
SLACK_BYTES = 2**12  # of what does not grow with the input


class CountedText(str):
    """A text that counts the characters which its operations read or copy. Their results count too.

    Neither bytecode nor bytes tell what a search reads.
    """

    num_characters: ClassVar[int] = 0  # read or copied, of all texts

    def __add__(self, other: str) -> Any:
        return _count(str.__add__(self, other), len(self) + len(other))

    def __radd__(self, other: str) -> Any:
        return _count(str.__add__(other, self), len(self) + len(other))

    def __getitem__(self, key: Any) -> Any:
        result = str.__getitem__(self, key)
        return _count(result, len(result))

    def __iter__(self) -> Iterator[str]:
        return _count(str.__iter__(self), len(self))

    def __contains__(self, other: object) -> Any:
        return _count(str.__contains__(self, other), len(self))  # type: ignore[arg-type]

    def startswith(self, prefix: Any, *args: Any) -> Any:
        return _count(str.startswith(self, prefix, *args), len(prefix))

    def endswith(self, suffix: Any, *args: Any) -> Any:
        return _count(str.endswith(self, suffix, *args), len(suffix))

    def find(self, part: str, start: int = 0, *args: Any) -> Any:  # type: ignore[override]
        found = str.find(self, part, start, *args)
        return _count(found, (found + len(part) if found >= 0 else len(self)) - start)


def _count(result: Any, num_characters: int) -> Any:
    CountedText.num_characters += num_characters
    return _wrap(result)


def _wrap(result: Any) -> Any:
    if type(result) is str:
        return CountedText(result)
    return type(result)(map(_wrap, result)) if isinstance(result, tuple | list) else result


def _count_all(name: str) -> Callable[..., Any]:
    method = getattr(str, name)
    return lambda self, *args: _count(method(self, *args), len(self))


READING_ALL = ("isspace", "lstrip", "rstrip", "strip", "partition", "split", "removeprefix", "replace", "encode")
for _name in READING_ALL:
    setattr(CountedText, _name, _count_all(_name))


class Work(NamedTuple):
    """The work of a call."""

    num_steps: int  # bytecode instructions of `retain`, and calls of any function
    num_characters: int  # that operations of CountedText read or copied
    num_bytes: int  # allocated: a copy that grows costs bytes and no step


def count_work(prepare: Callable[[], Callable[[], object]]) -> Work:
    """Return the work of a function that is prepared twice: for its steps, and for its bytes."""
    function = prepare()
    num_before = CountedText.num_characters
    num_steps = _count_steps(function)
    num_characters = CountedText.num_characters - num_before
    return Work(num_steps, num_characters, _count_bytes(prepare()))


def _count_steps(function: Callable[[], object]) -> int:
    num_steps = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_steps
        num_steps += event != "return"

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_steps
        num_steps += 1
        if not _is_ours(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return count

    _run_traced(function, trace)
    return num_steps


def _count_bytes(function: Callable[[], object]) -> int:
    """Return the bytes that were allocated: in each line those that were there at once."""
    num_bytes = 0
    present = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_bytes, present
        _, peak = tracemalloc.get_traced_memory()
        num_bytes += max(peak - present, 0)  # since the last event
        present, _ = tracemalloc.get_traced_memory()  # with what this function has allocated
        tracemalloc.reset_peak()
        return trace if _is_ours(frame) else None

    tracemalloc.start()
    try:
        _run_traced(function, trace)
    finally:
        tracemalloc.stop()
    return num_bytes


@contextmanager
def at_most(num_steps: int) -> Iterator[None]:
    """Check that the block runs at most so many lines of `retain` and calls of any function. It ends at the next one.

    That tells a pass over some data from one that a damaged count repeats for minutes.
    """
    num_left = num_steps

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_left
        num_left -= event != "return"
        assert num_left >= 0, f"more than {num_steps} steps"
        return count

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        count(frame, event, arg)
        return count if _is_ours(frame) else None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
    assert num_left >= 0, f"more than {num_steps} steps"  # also where the block has caught that


def _run_traced(function: Callable[[], object], trace: Callable[[FrameType, str, object], Any]) -> None:
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(previous)


def _is_ours(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").partition(".")[0] == "retain")


def assert_linear(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Check that work on an input of twice the size is about twice as much, by each count.

    `prepare` returns a function that does the work on an input of some size. Its first call is not counted.
    """
    prepare(size)()
    once = count_work(lambda: prepare(size))
    twice = count_work(lambda: prepare(2 * size))
    assert twice.num_steps <= MAX_GROWTH * once.num_steps, (once, twice)
    assert twice.num_characters <= MAX_GROWTH * once.num_characters, (once, twice)
    assert twice.num_bytes <= MAX_GROWTH * once.num_bytes + SLACK_BYTES, (once, twice)


def cut_into_pieces(text: str, size: int) -> list[str]:
    """Cut a text into pieces of this many characters, as tokens bring it."""
    return [text[i : i + size] for i in range(0, len(text), size)]
