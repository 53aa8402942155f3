"""Text of others, such as answers of models, errors of servers and log lines, as a terminal may show it.

A terminal obeys control characters: they move the cursor, change the title, and may type into the shell. Characters
that turn the direction of a line make it read as something else.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

# C0 but tab and newline, DEL, C1, what directs a line or ends it, and halves of characters, which cannot be written.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


DIM = "\x1b[2m"
NORMAL = "\x1b[22m"


def escape_controls(text: str) -> str:
    r"""Return a text whose control characters are visible, as `\x1b`. Tabs and newlines stay."""
    return CONTROLS.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class EscapingFormatter(logging.Formatter):
    """Formats log records, which may quote clients, with visible control characters."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        return escape_controls(super().format(record))


class EscapingStream:
    """A stream of text that shows control characters, and is otherwise the stream that it was made of."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text. Returns its length."""
        self._stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_dimmed(stream: TextIO, text: str) -> None:
    """Write a text, with visible control characters, in the dim style of a terminal."""
    to = stream._stream if isinstance(stream, EscapingStream) else stream
    to.write(f"{DIM}{escape_controls(text)}{NORMAL}")


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape what is printed to standard output while it is a terminal; files and pipes get exactly what is printed."""
    stream = sys.stdout
    if stream.isatty():
        sys.stdout = cast(TextIO, EscapingStream(stream))
    try:
        yield
    finally:
        sys.stdout = stream
