"""Literals of calls that are no JSON: Python's, with the names that JSON has, and those of Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isinf
from typing import Any, TypeVar

T = TypeVar("T")
MAX_DEPTH = 64
BLANK = re.compile(r"\s*")
NAME = re.compile(r"[^\W\d][\w.-]*")
NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][+-]?\d+)?")
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", **{c: c for c in "\\/'\""}}
CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
CLOSERS = {"[": "]", "(": ")", "{": "}"}


@dataclass
class LiteralReader:
    """Reads values of a text one after the other. Each method raises ValueError where the text is not as expected.

    `quotes` are around strings; a backslash escapes a character in them if `escapes`. Keys of objects may be bare.
    """

    text: str
    quotes: tuple[str, ...] = ('"', "'")
    escapes: bool = True
    position: int = 0
    depth: int = 0

    @property
    def is_at_end(self) -> bool:
        """Whether nothing but blanks follows."""
        self.skip_blanks()
        return self.position == len(self.text)

    def skip_blanks(self) -> None:
        """Go to the next character that is not blank."""
        found = BLANK.match(self.text, self.position)
        assert found
        self.position = found.end()

    def take(self, expected: str) -> bool:
        """Skip a text behind blanks. Returns whether it is there."""
        self.skip_blanks()
        is_there = self.text.startswith(expected, self.position)
        self.position += len(expected) * is_there
        return is_there

    def expect(self, expected: str) -> None:
        """Skip a text behind blanks."""
        if not self.take(expected):
            raise ValueError(f"no {expected!r} at {self.position}")

    def read_name(self) -> str:
        """Read a bare name: letters, digits, and the signs that names of functions have."""
        return self._match(NAME)[0]

    def read_value(self) -> Any:
        """Read a string, a number, a constant, a list or an object."""
        self.skip_blanks()
        if quote := next((q for q in self.quotes if self.text.startswith(q, self.position)), None):
            return self._read_string(quote)
        first = self.text[self.position : self.position + 1]
        if first in ("[", "("):
            return self._read_list(first)
        if first == "{":
            return self._read_object()
        if NAME.match(first):
            name = self.read_name()
            if name not in CONSTANTS:
                raise ValueError(f"{name} is no value")
            return CONSTANTS[name]
        number = self._match(NUMBER)
        if not (number[1] or number[2]):
            return int(number[0])
        value = float(number[0])
        if isinf(value):  # JSON has no such number
            raise ValueError(f"{number[0]} is too large")
        return value

    def read_arguments(self, closer: str) -> dict[str, Any]:
        """Read `name=value, ...` up to a closing bracket."""
        return dict(self._iter_items(closer, lambda: self._read_member(self.read_name, "=")))

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self.skip_blanks()
        found = pattern.match(self.text, self.position)
        if not found:
            raise ValueError(f"no value at {self.position}")
        self.position = found.end()
        return found

    def _enter(self) -> None:
        self.position += 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("a value is nested too deeply")

    def _read_list(self, opener: str) -> list[Any]:
        self._enter()
        values = list(self._iter_items(CLOSERS[opener], self.read_value))
        self.depth -= 1
        return values

    def _read_object(self) -> dict[str, Any]:
        self._enter()
        members = dict(self._iter_items("}", lambda: self._read_member(self._read_key, ":")))
        self.depth -= 1
        return members

    def _iter_items(self, closer: str, read: Callable[[], T]) -> Iterator[T]:
        """Read items with commas between them, and perhaps behind them, up to a closing bracket."""
        while not self.take(closer):
            yield read()
            if not self.take(","):
                self.expect(closer)
                return

    def _read_member(self, read_key: Callable[[], str], separator: str) -> tuple[str, Any]:
        key = read_key()
        self.expect(separator)
        return key, self.read_value()

    def _read_key(self) -> str:
        self.skip_blanks()
        quote = next((q for q in self.quotes if self.text.startswith(q, self.position)), None)
        if quote:
            return self._read_string(quote)
        end = self.text.find(":", self.position)
        if end <= self.position:
            raise ValueError(f"no key at {self.position}")
        key = self.text[self.position : end].strip()
        self.position = end
        return key

    def _read_string(self, quote: str) -> str:
        begin = self.position + len(quote)
        end = begin
        while True:
            end = self.text.find(quote, end)
            if end < 0:
                raise ValueError("a string does not end")
            if not self.escapes or not _is_escaped(self.text, begin, end):
                break
            end += len(quote)
        self.position = end + len(quote)
        raw = self.text[begin:end]
        return unescape(raw) if self.escapes else raw


def _is_escaped(text: str, begin: int, end: int) -> bool:
    """Return whether an odd number of backslashes precedes a position."""
    start = end
    while start > begin and text[start - 1] == "\\":
        start -= 1
    return (end - start) % 2 == 1


def unescape(text: str) -> str:
    """Return a text without the escapes of Python and JSON. Others stay as they are."""
    if "\\" not in text:
        return text

    def replace(found: re.Match[str]) -> str:
        escape = found[1]
        if len(escape) > 1:
            return chr(int(escape[1:], 16))
        return ESCAPED.get(escape, found[0])

    joined = ESCAPE.sub(replace, text)
    return joined.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
