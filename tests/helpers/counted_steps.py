"""Counts of work that do not depend on the machine: bytecode that `retain` runs, and characters that texts touch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

MAX_GROWTH = 2.3  # of the count for a doubled input: 2 where the work is linear, 4 where it is quadratic


class StepCounter:
    """Counts the steps of a function that works on texts of this counter."""

    def __init__(self) -> None:
        self.num_steps = 0

    def text(self, value: str) -> CountedText:
        """Return a text whose operations count, and whose results count too."""
        text = CountedText(value)
        text.counter = self
        return text

    def run(self, function: Callable[[], object]) -> None:
        """Run a function, and count the bytecode instructions of `retain` that it executes."""
        previous = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        finally:
            sys.settrace(previous)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if "retain" not in frame.f_globals.get("__name__", ""):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.num_steps += event == "opcode"
        return self._trace

    def wrap(self, result: Any) -> Any:
        """Return the result of an operation, with texts of this counter."""
        if type(result) is str:
            return self.text(result)
        return type(result)(map(self.wrap, result)) if isinstance(result, tuple | list) else result


class CountedText(str):
    """A text that counts the characters which its operations read or copy."""

    counter: StepCounter

    def __add__(self, other: str) -> Any:
        return self._count(str.__add__(self, other), len(self) + len(other))

    def __radd__(self, other: str) -> Any:
        return self._count(str.__add__(other, self), len(self) + len(other))

    def __getitem__(self, key: Any) -> Any:
        result = str.__getitem__(self, key)
        return self._count(result, len(result))

    def __iter__(self) -> Iterator[str]:
        return self._count(str.__iter__(self), len(self))

    def __contains__(self, other: object) -> Any:
        return self._count(str.__contains__(self, other), len(self))  # type: ignore[arg-type]

    def startswith(self, prefix: Any, *args: Any) -> Any:
        return self._count(str.startswith(self, prefix, *args), len(prefix))

    def endswith(self, suffix: Any, *args: Any) -> Any:
        return self._count(str.endswith(self, suffix, *args), len(suffix))

    def find(self, part: str, start: int = 0, *args: Any) -> Any:  # type: ignore[override]
        found = str.find(self, part, start, *args)
        return self._count(found, (found + len(part) if found >= 0 else len(self)) - start)

    def _count(self, result: Any, num_steps: int) -> Any:
        self.counter.num_steps += num_steps
        return self.counter.wrap(result)


def _count_all(name: str) -> Callable[..., Any]:
    method = getattr(str, name)
    return lambda self, *args: self._count(method(self, *args), len(self))


READING_ALL = ("isspace", "lstrip", "rstrip", "strip", "partition", "split", "removeprefix", "replace", "encode")
for _name in READING_ALL:
    setattr(CountedText, _name, _count_all(_name))


def count_steps(function: Callable[[StepCounter], Callable[[], object]]) -> int:
    """Count the steps of what the function returns for a new counter; what it prepares does not count."""
    counter = StepCounter()
    prepared = function(counter)
    counter.num_steps = 0
    counter.run(prepared)
    return counter.num_steps


def assert_linear(function: Callable[[StepCounter, int], Callable[[], object]], size: int) -> None:
    """Check that an input of twice the size takes about twice the steps."""
    once, twice = (count_steps(lambda counter, n=n: function(counter, n)) for n in (size, 2 * size))
    assert twice <= MAX_GROWTH * once, f"{once} steps for {size}, {twice} for {2 * size}"


def cut_into_pieces(text: str, size: int) -> list[str]:
    """Cut a text into pieces of this many characters, as tokens bring it."""
    return [text[i : i + size] for i in range(0, len(text), size)]
